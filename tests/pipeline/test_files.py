"""Hashing files once, never from a stale stamp; writing them in one step."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path

import pytest

from layerline.pipeline import hashing
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.files import check_replaceable, sync, write_atomic
from layerline.pipeline.hashing import Hasher, sha256


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_sha256_is_that_of_the_bytes(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    (tmp_path / "x").write_bytes(content)
    assert sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is read."""
    seen: list[Path] = []

    def counted(path: Path) -> str:
        seen.append(path)
        return sha256(path)

    monkeypatch.setattr(hashing, "sha256", counted)
    return seen


def later(monkeypatch: pytest.MonkeyPatch, seconds: float = 10) -> None:
    """Lets time pass, for us but not for the file system."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + int(seconds * 1e9))


def test_a_settled_file_is_read_once_also_by_other_processes(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memo = tmp_path / "x", tmp_path / "cache" / "memo.json"
    path.write_text("a")
    later(monkeypatch)
    first = Hasher(memo)
    values = {first.file(path), first.file(path)}
    first.save()
    second = Hasher(memo)
    values.add(second.file(path))
    assert values == {hashlib.sha256(b"a").hexdigest()}
    assert reads == [path]
    assert str(tmp_path) not in memo.read_text()


def test_a_file_changed_a_moment_ago_is_never_remembered(tmp_path: Path) -> None:
    """Within one tick of the file system's clock, a change of one byte leaves no trace in any stamp."""
    path, hasher = tmp_path / "x", Hasher(tmp_path / "memo.json")
    for round_ in range(200):
        text = f"{round_:03d}"
        path.write_text(text)
        os.utime(path, ns=(0, 0))
        assert hasher.file(path) == hashlib.sha256(text.encode()).hexdigest()
    hasher.save()
    assert not (tmp_path / "memo.json").exists()


def test_a_byte_changed_under_the_same_size_and_mtime_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hasher = tmp_path / "x", Hasher(tmp_path / "memo.json")
    path.write_text("aaaa")
    os.utime(path, ns=(10**18, 10**18))
    later(monkeypatch)
    before = hasher.file(path)
    time.sleep(0.02)  # more than a tick
    path.write_text("aaba")
    os.utime(path, ns=(10**18, 10**18))
    assert hasher.file(path) != before


def test_a_file_that_is_replaced_while_it_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hasher = tmp_path / "x", Hasher(tmp_path / "memo.json")
    path.write_text("a")
    later(monkeypatch)

    def slow(path: Path) -> str:
        value = sha256(path)
        path.with_name("y").write_text("b")
        path.with_name("y").replace(path)
        return value

    with monkeypatch.context() as context:
        context.setattr(hashing, "sha256", slow)
        hasher.file(path)
    assert hasher.file(path) == hashlib.sha256(b"b").hexdigest()


def test_where_ctime_is_no_change_time_nothing_is_remembered(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hasher = tmp_path / "x", Hasher(tmp_path / "memo.json")
    path.write_text("a")
    later(monkeypatch)
    monkeypatch.setattr(os, "name", "nt")
    hasher.file(path), hasher.file(path)
    assert len(reads) == 2


def test_what_a_run_used_is_kept_whole_and_the_rest_is_bounded(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_MEMO_ENTRIES", 3)
    memo = tmp_path / "memo.json"
    paths = [tmp_path / f"{i}" for i in range(10)]
    for path in paths:
        path.write_text(path.name)
    later(monkeypatch)
    first = Hasher(memo)
    for path in paths:
        first.file(path)
    first.save()
    assert len(json.loads(memo.read_text())) == 10
    other = tmp_path / "other"
    other.write_text("other")
    later(monkeypatch)
    second = Hasher(memo)
    second.file(paths[0]), second.file(other)
    second.save()
    assert len(json.loads(memo.read_text())) == 5  # two used, three others
    assert len(reads) == 11


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, "old")
    write_atomic(path, "new ☃\n")
    assert path.read_bytes() == "new ☃\n".encode()

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no"):
        write_atomic(path, "newer")
    assert path.read_text() == "new ☃\n"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_names_are_put_on_the_disk_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda d: done.append("folder" if stat.S_ISDIR(os.fstat(d).st_mode) else "file"))
    monkeypatch.setattr(Path, "replace", lambda s, t: (done.append("rename"), replace(s, t))[1])
    write_atomic(tmp_path / "x", "text")
    assert done == ["file", "rename", "folder"]
    sync(tmp_path)
    assert done[3:] == ["folder"]


def test_only_a_file_gives_way_to_a_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    (tmp_path / "link").symlink_to("page.html")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (Path(), Path("/"), tmp_path, tmp_path / "link", tmp_path / "dangling", Path(os.devnull)):
        with pytest.raises(ConfigError, match="a folder, a device or a link, expected a file"):
            check_replaceable(path)
    check_replaceable(tmp_path / "page.html")
    check_replaceable(tmp_path / "new.html")
