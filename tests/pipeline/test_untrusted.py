"""Text, names, numbers, JSON, YAML and arrays from outside: what is read, and what is refused before it is built."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerline.pipeline import untrusted
from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs import npz


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv.weight", "conv.weight"),
        ("größe 大小 ✓", "größe 大小 ✓"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\r\nb\x00\x7f\x9b", "a\\x0d\\x0ab\\x00\\x7f\\x9b"),
        ("a\x85b\u2028c\u2029", "a\\x85b\\u2028c\\u2029"),
        ("\u202eexe\u2066", "\\u202eexe\\u2066"),
        ("file\udcff", "file\\udcff"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_a_terminal_is_shown_text_and_obeys_none(text: str, shown: str) -> None:
    assert untrusted.printable(text) == shown


def test_printable_text_is_cut_and_may_keep_its_line_breaks() -> None:
    assert untrusted.printable("a" * 10, 10) == "a" * 10
    assert untrusted.printable("a" * 11, 10) == "a" * 9 + "…"
    assert untrusted.printable("\x1b" * 10**6, 6) == "\\x1b\\…"
    assert untrusted.printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@given(st.text(), st.integers(1, 30))
def test_what_is_printable_is_printable_and_within_its_limit(text: str, limit: int) -> None:
    shown = untrusted.printable(text, limit)
    assert shown.isprintable() and len(shown) <= limit


@pytest.mark.parametrize("text", ["a" * 64, "0123456789abcdef" * 4])
def test_digests(text: str) -> None:
    assert untrusted.is_digest(text)


@pytest.mark.parametrize("text", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "²" * 64, None, 5, ["a"]])
def test_what_is_no_digest(text: object) -> None:
    assert not untrusted.is_digest(text)


@pytest.mark.parametrize(
    ("text", "name", "inside"),
    [
        ("model.onnx", True, True),
        ("größe", True, True),
        ("a/b", False, True),
        ("..", False, False),
        ("a/../../b", False, False),
        ("/etc", False, False),
        ("C:x", True, False),
        ("C:\\x", False, False),
        ("..\\x", False, False),
        ("a\x00", False, False),
        ("a\nb", False, True),
        ("a\udcff", False, True),
        ("", False, False),
        (".", False, False),
        ("é" * 200, False, True),
        (7, False, False),
    ],
)
def test_names_of_files_and_paths_inside_a_folder(text: object, name: bool, inside: bool) -> None:
    assert (untrusted.is_file_name(text), untrusted.is_inside(text)) == (name, inside)


def test_links_are_followed_where_the_folder_is_given(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "out").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside)
    (inside / "prefix").symlink_to(tmp_path / "inside-not")
    assert untrusted.is_inside("out/file") and not untrusted.is_inside("out/file", inside)
    assert untrusted.is_inside("loop/loop/file", inside) and untrusted.is_inside("missing/file", inside)
    assert not untrusted.is_inside("prefix/file", inside), "a folder whose name only begins like it"
    assert not untrusted.is_inside("C:\\file", inside) and not untrusted.is_inside("../inside/file", inside)


def test_integers() -> None:
    assert untrusted.integer(" 007 ", 0, 9) == 7
    assert untrusted.integer("-3", -3, 9) == -3
    with pytest.raises(ValueError, match=r"expected an integer from 0 to 9, saw '10'"):
        untrusted.integer("10", 0, 9)
    with pytest.raises(ValueError, match=r"saw '9{39}…' \(5000 characters\)"):
        untrusted.integer("9" * 5000, 0, 2**63)
    for text in ("", "²", "٣", "1_0", "0x1", "1.0", "1e3", "--1"):
        with pytest.raises(ValueError, match="expected an integer"):
            untrusted.integer(text, 0, 9)
    assert untrusted.is_number("12")
    assert not any(map(untrusted.is_number, ("²", "٣", "-1", "", "9" * 41)))


def test_json_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, 2.5, null]}')
    assert untrusted.read_json(file) == {"a": [1, 2.5, None]}
    nested = "[" * 65 + "]" * 65
    assert untrusted.parse_json(nested[1:-1]) is not None
    for text, said in (
        (nested, "more than 64 levels"),
        ("[" * 100_000, "more than 64 levels"),
        ("9" * 5000, "integer of 5000 digits"),
        ('{"a": ' + "9" * 41 + "}", "integer of 41 digits"),
        ("", "Expecting value"),
        ("\udcff", ""),
    ):
        with pytest.raises(ValueError, match=said):
            untrusted.parse_json(text)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError):
        untrusted.read_json(file)
    file.write_text(json.dumps("x" * 100))
    with pytest.raises(ValueError, match="larger than 50 bytes"):
        untrusted.read_json(file, size=50)


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))

# text -> the error
BAD_YAML = {
    "aliases of aliases": (BOMB, r"stands for more than 20000 values"),
    "merges of merges": (BOMB.replace("[1, 1]", "{x: 1}"), "more than 20000 values"),
    "a long chain of aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40)),
        r"p:\d+:\d+: it is nested more than 24 levels",
    ),
    "an alias for itself": ("a: &a [*a]\n", "p:1:8: an alias in it stands for itself"),
    "a merge of itself": ("a: &a {<<: *a}\n", "p:1:12: an alias in it stands for itself"),
    "brackets": ("[" * 100_000, "p:1:25: it is nested more than 24 levels"),
    "dashes": ("- " * 1000, "p:1:49: it is nested more than 24 levels"),
    "a long comment": ("#" + "x" * (1 << 17), "131073 characters, expected at most 131072"),
    "many values": ("[" + "1," * 30_000 + "]", "stands for more than 20000 values"),
    "digits": ("a: " + "9" * 5000, "p:1:4: an integer of 5000 characters, expected at most 40"),
    "digits of a key": ("? " + "9" * 5000, "p:1:3: an integer of 5000 characters, expected at most 40"),
    "digits in hex": ("a: 0x" + "f" * 5000, "p:1:4: an integer of 5002 characters, expected at most 40"),
    "digits in sixty": ("%YAML 1.1\n---\na: " + "59:" * 2000 + "1", "p:3:4: an integer of 6001 characters"),
    "a tagged integer": ("a: !!int '" + "9" * 5000 + "'", "p:1:4: "),
    "a date that is none": ("a: 2020-13-45", "p:1:4: not valid YAML: ValueError: month must be in 1..12"),
    "a broken tag": ("a: !!omap 3", "p:1:4: not valid YAML"),
    "a control character": ("a: \x1b", "p: not valid YAML"),
    "digits of a version": ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "p: not valid YAML: ValueError"),
    "an escape past Unicode": ('a: "\\Uffffffff"', "p: not valid YAML: OverflowError"),
    "an ordered mapping with a key twice": ("!!omap\n- a: b\n- a: c", "p: not valid YAML: AssertionError"),
    "an undefined alias": ("a: *b", "p:1:4: not valid YAML: found undefined alias 'b'"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_yaml_is_bounded(name: str) -> None:
    text, said = BAD_YAML[name]
    with pytest.raises(ConfigError, match=said) as caught:
        bounded_yaml.parse(text, "p")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_yaml_that_is_read() -> None:
    assert bounded_yaml.parse("a: &a {x: 1}\nb: [*a, *a, {<<: *a, y: 2}]", "p")["b"][2]["x"] == 1
    assert bounded_yaml.parse("a: " + "deadbeef" * 8, "p")["a"] == "deadbeef" * 8
    assert bounded_yaml.parse("a: 0." + "1" * 60, "p")["a"] == pytest.approx(1 / 9)
    assert bounded_yaml.parse("a: !!python/object/apply:os.system ['exit 1']", "p")["a"] == ["exit 1"]


def _npz(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return path


def _npy(shape: object, dtype: str = "<f4", data: bytes = b"") -> bytes:
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def test_arrays_come_as_numpy_wrote_them(tmp_path: Path) -> None:
    arrays = {
        "x": np.arange(6, dtype="f").reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "a/b": np.float16(3),
        "none": np.zeros((0, 4)),
        "big": np.arange(3, dtype=">i4"),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "s.npz", **arrays)
        found = npz.read(tmp_path / "s.npz")
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[n], a) and found[n].dtype == a.dtype for n, a in arrays.items())


# content of the array x -> the error
BAD_NPY = {
    "a size that is not there": (_npy((10**30,)), r"s\.npz: x: its shape .* takes more than 10\^15 bytes, it has 0"),
    "many large axes": (_npy((10**9,) * 32), r"takes more than 10\^15 bytes, it has 0"),
    "many axes": (_npy((1,) * 40, data=b"1234"), "expected at most 32 sizes"),
    "a negative size": (_npy((-1,), data=b"1234"), "its shape is"),
    "less than its shape": (_npy((2,), data=b"1234"), "takes 8 bytes, it has 4"),
    "more than its shape": (_npy((2,), data=b"123456789"), "takes 8 bytes, it has 9"),
    "objects": (_npy((1,), "|O", b"x"), "holds Python objects"),
    "a nested header": (_npy("(" * 4000), "not an .npz file of plain arrays"),
    "a header that is no literal": (_npy((1,), "f4', 'x': __import__('os')"), "not an .npz file of plain arrays"),
    "digits": (_npy("9" * 5000).replace(b"'9", b"(9").replace(b"9'", b"9,)"), "not an .npz file of plain arrays"),
    "no array": (b"hello", "not an .npz file of plain arrays"),
    "nothing": (b"", "not an .npz file of plain arrays"),
}


@pytest.mark.parametrize("name", BAD_NPY)
def test_arrays_are_held_against_what_is_there(name: str, tmp_path: Path) -> None:
    content, said = BAD_NPY[name]
    with pytest.raises(ConfigError, match=said):
        npz.read(_npz(tmp_path / "s.npz", x=content))


def test_files_that_are_no_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.npz"
    np.save(io_file := io.BytesIO(), np.zeros(3))
    for content, said in (
        (io_file.getvalue(), "a single array"),
        (b"", "not an .npz"),
        (b"PK\x03\x04" + b"\xff" * 99, "not an .npz"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            npz.read(file)
    np.savez_compressed(file, x=np.zeros(1 << 16))
    monkeypatch.setattr(npz, "UNPACKED", 1 << 10)
    with pytest.raises(ConfigError, match="unpacks to"):
        npz.read(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x\x1b.npy", _npy((), data=b"1234"))
    with pytest.raises(ConfigError, match=r"s\.npz: x\\x1b: expected an array with a printable name"):
        npz.read(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", _npy((), data=b"1234"))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.npy", _npy((), data=b"1234"))
    with pytest.raises(ConfigError, match="two arrays of this name"):
        npz.read(file)
