"""Artifacts: sealed, moved in with one rename, verified when read, never copied."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from layerline.pipeline import hashing
from layerline.pipeline.errors import StageError
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.records.store import MANIFEST, Artifact, DamagedError, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", Hasher(tmp_path / "memo.json"))


def out(tmp_path: Path, name: str = "out", **contents: str) -> Path:
    """A stage's finished folder; `a__b` is b in the folder a."""
    folder = tmp_path / name
    folder.mkdir()
    for file, text in contents.items():
        path = folder / file.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def seal(store: Store, tmp_path: Path, name: str, kind: str = "onnx", **contents: str) -> Artifact:
    return store.seal(out(tmp_path, name, **contents), kind, frozenset({"time"}))


def test_an_artifact_goes_in_whole_and_comes_out_the_same(store: Store, tmp_path: Path) -> None:
    sealed = seal(store, tmp_path, "out", model="m", data__weights="www")
    made = store.move_in(sealed)
    assert made == store.get(made.digest)
    assert (made.kind, made.size, made.path) == ("onnx", 4, store.root / made.digest)
    assert (made.path / "data" / "weights").read_text() == "www"
    assert not sealed.path.exists()
    assert list(store.digests()) == [made.digest]
    assert all(p.stat().st_mode & 0o222 == 0 for p in (made.path / "model", made.path / "data" / "weights"))


def test_golden_digest(store: Store, tmp_path: Path) -> None:
    digest = seal(store, tmp_path, "out", model="m", data__weights="www").digest
    assert digest == "5db077f92e8be904cd5b668fc88040d83bfa9ced8b12b5f33ff4c8c3d34c251a"


def test_a_digest_is_of_kind_names_and_bytes_and_of_nothing_else(store: Store, tmp_path: Path) -> None:
    base = seal(store, tmp_path, "a", model="m", data__w="1").digest
    assert seal(store, tmp_path / "a", "b", model="m", data__w="1").digest == base  # another folder
    assert seal(store, tmp_path, "side", model="m", data__w="1", time="12:00").digest == base
    different = [
        seal(store, tmp_path, "kind", "engine", model="m", data__w="1").digest,
        seal(store, tmp_path, "bytes", model="m", data__w="2").digest,  # T41: data in a folder below counts
        seal(store, tmp_path, "name", model="m", data__v="1").digest,
        seal(store, tmp_path, "place", model="m", w="1").digest,
        seal(store, tmp_path, "fewer", model="m").digest,
        seal(store, tmp_path, "none").digest,
    ]
    assert len({base, *different}) == len(different) + 1


def test_nothing_absolute_is_in_an_artifact(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "out", model="m"))
    assert str(tmp_path) not in (made.path / MANIFEST).read_text()
    shutil.copytree(store.root, tmp_path / "elsewhere")
    moved = Store(tmp_path / "elsewhere", Hasher(tmp_path / "memo.json")).get(made.digest)
    assert moved is not None and moved.digest == made.digest


def test_each_file_is_read_once_and_nothing_is_copied(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(hashing, "sha256", lambda path, real=hashing.sha256: (read.append(path.name), real(path))[1])
    folder = out(tmp_path, model="m", data__w="1")
    inodes = {p.name: p.stat().st_ino for p in folder.rglob("*")}
    made = store.move_in(store.seal(folder, "onnx"))
    assert sorted(read) == ["model", "w"]
    assert {p.name: p.stat().st_ino for p in made.path.rglob("*") if p.name != MANIFEST} == inodes


def test_the_same_content_again_is_kept_once(store: Store, tmp_path: Path) -> None:
    first = store.move_in(seal(store, tmp_path, "a", model="m", time="1"))
    again = seal(store, tmp_path, "b", model="m", time="2")
    assert store.move_in(again) == first
    assert not again.path.exists() and (first.path / "time").read_text() == "1"


@pytest.mark.parametrize("damage", ["missing", "changed", "no manifest", "empty"])
def test_damaged_content_gives_way_to_the_same_made_again(damage: str, store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", other="o"))
    (made.path / "model").chmod(0o644)
    {
        "missing": lambda: (made.path / "model").unlink(),
        "changed": lambda: (made.path / "model").write_text("x"),
        "no manifest": lambda: (made.path / MANIFEST).unlink(),
        "empty": lambda: (shutil.rmtree(made.path), made.path.mkdir()),
    }[damage]()
    with pytest.raises(DamagedError):
        store.get(made.digest)
    assert store.move_in(seal(store, tmp_path, "b", model="m", other="o")) == made == store.get(made.digest)
    assert list(store.root.iterdir()) == [made.path]


def test_what_is_wrong_is_named(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", data__w="123"))
    path = made.path / "data" / "w"
    path.chmod(0o644)
    path.write_text("124")
    with pytest.raises(DamagedError, match="data/w has changed since it was written"):
        store.get(made.digest)
    path.write_text("12")
    with pytest.raises(DamagedError, match="data/w has 2 bytes, not 3"):
        store.get(made.digest)
    path.unlink()
    with pytest.raises(DamagedError, match="data/w is missing"):
        store.get(made.digest)


@pytest.mark.parametrize(
    "name", ["floor.json", "data/floor.json", ".hidden", "new/deep/x", "link", "data/link", "pipe"]
)
def test_what_the_manifest_does_not_list_is_refused(name: str, store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", data__w="1"))
    path = made.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "pipe":
        os.mkfifo(path)
    elif "link" in name:
        path.symlink_to(tmp_path)
    else:
        path.write_text("{}")
    with pytest.raises(DamagedError, match=f"{name} is (a link|not listed)"):
        store.get(made.digest)
    assert store.sealed(made.path) is None
    # Made again, it takes the place of the damaged one.
    assert store.move_in(seal(store, tmp_path, "b", model="m", data__w="1")) == made == store.get(made.digest)


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_link_in_the_place_of_a_listed_file_or_folder_is_refused(name: str, store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", data__w="1"))
    (made.path / name).rename(tmp_path / "moved")
    (made.path / name).symlink_to(tmp_path / "moved")  # the same bytes, and whoever owns them may change them
    with pytest.raises(DamagedError, match=f"{name} is a link"):
        store.get(made.digest)


def test_what_a_file_browser_leaves_is_no_damage(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m"))
    (made.path / ".DS_Store").write_text("x")
    (made.path / "empty").mkdir()
    assert store.get(made.digest) == made


def test_an_artifact_under_another_s_name_is_refused(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m"))
    made.path.rename(store.root / ("0" * 64))
    with pytest.raises(DamagedError, match=f"artifact.json is that of {made.digest[:12]}"):
        store.get("0" * 64)


def test_a_side_file_is_verified_too(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", time="1"))
    (made.path / "time").chmod(0o644)
    (made.path / "time").write_text("2")
    with pytest.raises(DamagedError, match="time has changed"):
        store.get(made.digest)


@pytest.mark.parametrize(
    "manifest", ["", "{", "[]", "5", "{}", '{"files": {}, "side": [], "kind": 1, "digest": ""}', "\0"]
)
def test_a_manifest_of_nonsense(manifest: str, store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m"))
    (made.path / MANIFEST).write_text(manifest)
    with pytest.raises(DamagedError, match="is damaged or missing"):
        store.get(made.digest)


@pytest.mark.parametrize("entry", [{"sha256": "x"}, {"size": 1}, "x", None, []])
def test_a_manifest_with_a_broken_entry(entry: object, store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m", time="1"))
    manifest = json.loads((made.path / MANIFEST).read_text())
    manifest["files"]["time"] = entry  # no part of the digest
    (made.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedError):
        store.get(made.digest)


@pytest.mark.parametrize("name", ["link", "broken", "folder", "pipe"])
def test_an_artifact_holds_plain_files(name: str, store: Store, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    mode = target.stat().st_mode
    folder = out(tmp_path, model="m")
    {
        "link": lambda: (folder / name).symlink_to(target),
        "broken": lambda: (folder / name).symlink_to(tmp_path / "no"),
        "folder": lambda: (folder / name).symlink_to(tmp_path),
        "pipe": lambda: os.mkfifo(folder / name),
    }[name]()
    with pytest.raises(StageError, match=f"it left {name}: an artifact holds plain files"):
        store.seal(folder, "onnx")
    assert target.stat().st_mode == mode  # and nothing outside was touched


def test_a_stage_cannot_write_its_own_manifest(store: Store, tmp_path: Path) -> None:
    folder = out(tmp_path, model="m")
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(StageError, match=MANIFEST):
        store.seal(folder, "onnx")


def test_sealed_tells_a_finished_folder_from_a_torn_one(store: Store, tmp_path: Path) -> None:
    folder = out(tmp_path, model="m")
    assert store.sealed(folder) is None
    artifact = store.seal(folder, "onnx")
    assert store.sealed(folder) == artifact
    (folder / "model").unlink()
    assert store.sealed(folder) is None


def test_removing(store: Store, tmp_path: Path) -> None:
    made = store.move_in(seal(store, tmp_path, "a", model="m"))
    store.remove(made.digest)
    store.remove(made.digest)  # as another process may have
    assert store.get(made.digest) is None and list(store.digests()) == []
    assert list(store.root.iterdir()) == []


def test_a_rename_that_is_refused_keeps_what_was_sealed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = seal(store, tmp_path, "a", model="m")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="No space"):
            store.move_in(sealed)
    assert store.sealed(sealed.path) == sealed
    assert store.move_in(sealed).digest == sealed.digest
