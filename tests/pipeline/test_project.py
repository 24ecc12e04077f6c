"""pipe.yaml and --set: what is understood, and mistakes told by line, column, field, what was seen and a valid name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from layerline.pipeline import stage_table
from layerline.pipeline.config.project import load
from layerline.pipeline.errors import ConfigError, Unavailable
from tests.pipeline import fakes


def project(tmp_path: Path, text: str | bytes, *sets: str) -> Any:
    (tmp_path / "pipe.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load(tmp_path, sets)


def source(tmp_path: Path, text: str, *sets: str) -> fakes.Source:
    stage = project(tmp_path, text, *sets).stage("source")
    assert isinstance(stage, fakes.Source)
    return stage


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "{}\n", "source:\n", "source: {}\n", "\ufeffname: x\n", "name: x\r\n"]
)
def test_a_project_needs_to_say_nothing(text: str, tmp_path: Path) -> None:
    found = project(tmp_path, text)
    assert [s.name for s in found.stages] == ["source", "double", "judge"]
    assert found.stage("source") == fakes.Source()
    assert (found.task, found.data, found.state) == ("task.py", (), tmp_path / ".layerline")


def test_the_name_is_the_folder_s_unless_it_is_given(tmp_path: Path) -> None:
    assert project(tmp_path, "").name == tmp_path.name
    assert project(tmp_path, "name: mnist").name == "mnist"


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ("2e-3", 0.002),
        ("2E-3", 0.002),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1", 1.0),
        ("-1.5", -1.5),
    ],
)
def test_numbers_are_numbers(written: str, rate: float, tmp_path: Path) -> None:
    assert source(tmp_path, f"source: {{rate: {written}}}").rate == rate
    assert source(tmp_path, "", f"source.rate={written}").rate == rate


@pytest.mark.parametrize("written", [".inf", "-.inf", ".nan", "1e400"])
def test_a_number_that_is_not_finite_is_refused(written: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source.rate: expected a finite number, saw (inf|-inf|nan)"):
        source(tmp_path, f"source: {{rate: {written}}}")


def test_anchors_merges_and_whole_number_keys(tmp_path: Path) -> None:
    text = """\
x-shared: &shared {warmup: 3, decay: linear}
"""
    with pytest.raises(ConfigError, match="x-shared: unknown key"):
        project(tmp_path, text)
    text = """\
source:
  schedule: &shared {warmup: 3, decay: linear}
  layers: [*shared, {<<: *shared, warmup: 4}]
  sizes: {0: 1, 5: 2}
"""
    stage = source(tmp_path, text)
    assert stage.layers == (fakes.Schedule(warmup=3, decay="linear"), fakes.Schedule(warmup=4, decay="linear"))
    assert stage.sizes == {0: 1, 5: 2}


# text -> the error, word for word
ERRORS: dict[str, tuple[str | bytes, str]] = {
    "an unknown key": (
        "name: x\nsuorce: {}\n",
        "pipe.yaml:2:1: suorce: unknown key\n  did you mean 'source'?",
    ),
    "a key like no other": (
        "zzz: 1\n",
        "pipe.yaml:1:1: zzz: unknown key\n  valid names: check, data, double, fault, import-numbers, judge, name, slow",
    ),
    "a number for a key": ("1: x\n", "pipe.yaml:1:1: 1: unknown key"),
    "a list for a key": ("? [a, b]\n: 1\n", "pipe.yaml"),
    "an unknown field": (
        "source:\n  rate: 1\n  epoch: 3\n",
        "pipe.yaml:3:3: source.epoch: unknown field\n  did you mean 'epochs'?",
    ),
    "an unknown field at depth": (
        "source:\n  schedule:\n    warmpu: 3\n",
        "pipe.yaml:3:5: source.schedule.warmpu: unknown field\n  did you mean 'warmup'?",
    ),
    "an unknown field in a list": (
        "source:\n  layers:\n    - warmup: 1\n    - warmup: 2\n      dekay: none\n",
        "pipe.yaml:5:7: source.layers.1.dekay: unknown field\n  did you mean 'decay'?",
    ),
    "an unknown value": (
        "source:\n  schedule: {decay: cosin}\n",
        "pipe.yaml:2:14: source.schedule.decay: unknown value 'cosin'\n  did you mean 'cosine'?",
    ),
    "text for a number": (
        "source:\n  epochs: ten\n",
        "pipe.yaml:2:3: source.epochs: expected an integer, saw 'ten'",
    ),
    "a mapping merged into itself": ("source: &a {<<: *a}\n", "pipe.yaml:1:17: an alias in it stands for itself"),
    "a number for text": ("source: {ignored: 3}\n", "pipe.yaml:1:10: source.ignored: expected text, saw 3"),
    "text for fields": (
        "source: {schedule: x}\n",
        "pipe.yaml:1:10: source.schedule: expected the fields warmup, decay, saw 'x'",
    ),
    "a list for a number": (
        "source: {rate: [1]}\n",
        "pipe.yaml:1:10: source.rate: expected a number, saw [1]",
    ),
    "a fraction for a whole number": (
        "source: {epochs: 1.5}\n",
        "pipe.yaml:1:10: source.epochs: expected an integer",
    ),
    "nothing for a number": (
        "source: {epochs: }\n",
        "pipe.yaml:1:10: source.epochs: expected an integer, saw None",
    ),
    "fields that are none": ("source: 5\n", "pipe.yaml:1:1: source: expected the fields of stage source, saw 5"),
    "fields that are a list": ("source: [1]\n", "pipe.yaml:1:1: source: expected the fields of stage source, saw [1]"),
    "a missing field": ("import-numbers: {}\n", "pipe.yaml:1:1: import-numbers.file: it is required, and missing"),
    "an absolute path": (
        "import-numbers:\n  file: /data/x.json\n",
        "pipe.yaml:2:3: import-numbers.file: expected a path inside the project, saw '/data/x.json'",
    ),
    "a name that is no text": ("name: 5\n", "pipe.yaml:1:1: name: expected text, saw 5"),
    "a task outside": (
        "task: ../task.py\n",
        "pipe.yaml:1:1: task: expected a path inside the project, saw '../task.py'",
    ),
    "a key twice": ("source:\n  rate: 1\n  rate: 2\n", 'pipe.yaml:3:3: not valid YAML: found duplicate key "rate"'),
    "a stage twice": ("source: {}\nsource: {}\n", 'pipe.yaml:2:1: not valid YAML: found duplicate key "source"'),
    "a tab": (
        "source:\n\trate: 1\n",
        "pipe.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token",
    ),
    "an open bracket": ("source: {rate: 1\n", "pipe.yaml:2:1: not valid YAML: "),
    "an open quote": ("name: 'x\n", "pipe.yaml:2:1: not valid YAML: "),
    "wrong indentation": (
        "source:\n  rate: 1\n   epochs: 2\n",
        "pipe.yaml:3:10: not valid YAML: mapping values are not allowed",
    ),
    "an unknown alias": ("source: *x\n", "pipe.yaml:1:9: not valid YAML: found undefined alias 'x'"),
    "an alias to itself": ("&x {source: *x}\n", "pipe.yaml:1:13: an alias in it stands for itself"),
    "two documents": ("name: a\n---\nname: b\n", "pipe.yaml:2:1: not valid YAML: but found another document"),
    "a list at the root": ("- source\n", "pipe.yaml:1:1: expected fields such as `train:`, saw a list"),
    "a word at the root": ("source\n", "pipe.yaml:1:1: expected fields such as `train:`, saw 'source'"),
    "other encodings": (b"name: \xff\xfe\n", "pipe.yaml: it is not UTF-8 text"),
    "control characters": (b"name: \x00\n", "pipe.yaml: not valid YAML: unacceptable character #x0000"),
    "data that is no list": ("data: x.csv\n", "pipe.yaml:1:1: data: expected a list of file patterns, saw 'x.csv'"),
    "data that is not there": ("data:\n  - y.csv\n", "pipe.yaml:2:5: data.0: no file matches 'y.csv'"),
    "data outside": ("data: [../x.csv]\n", "pipe.yaml:1:8: data.0: expected a path inside the project, saw '../x.csv'"),
    "data anywhere": ("data: [/etc/hosts]\n", "pipe.yaml:1:8: data.0: expected a path inside the project"),
    "empty data": ("data: ['']\n", "pipe.yaml:1:1: data: expected a list of file patterns, saw ['']"),
    "the folder itself as data": (
        "data: ['.']\n",
        "pipe.yaml:1:8: data.0: expected a path inside the project, saw '.'",
    ),
    "numbers as data": ("data: [1]\n", "pipe.yaml:1:1: data: expected a list of file patterns, saw [1]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_told_where_it_is(name: str, tmp_path: Path) -> None:
    text, expected = ERRORS[name]
    with pytest.raises(ConfigError) as caught:
        project(tmp_path, text)
    assert str(caught.value).startswith(expected)
    assert "ruamel" not in str(caught.value) and "Commented" not in str(caught.value)


def test_a_folder_without_a_pipe_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no pipe.yaml in .*\n  make a project: pipe init DIR"):
        load(tmp_path)


def test_data_patterns(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "raw/1.png", "raw/deep/2.png", ".layerline/store/x.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert project(tmp_path, "data: ['*.csv', a.csv]").data == ("a.csv", "b.csv")
    assert project(tmp_path, "data: ['**/*.csv']").data == ("a.csv", "b.csv")  # never what we keep ourselves
    assert project(tmp_path, "data: [raw]").data == ("raw/1.png", "raw/deep/2.png")
    assert project(tmp_path, "data: ['raw/*']").data == ("raw/1.png", "raw/deep/2.png")
    assert "pipe.yaml" in project(tmp_path, "data: ['*']").data


def test_data_stays_in_the_project(tmp_path: Path) -> None:
    root, outside = tmp_path / "p", tmp_path / "outside"
    for path in (root / "data" / "a.csv", root / "in" / "b.csv", outside / "c.csv", outside / "deep" / "d.csv"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "named").symlink_to(outside)
    (root / "data" / "inside").symlink_to(root / "in")
    (root / "data" / "back").symlink_to(root)
    (root / "in" / "round").symlink_to(root / "data")
    (root / "data" / "file.csv").symlink_to(outside / "c.csv")
    (root / "data" / "nowhere").symlink_to(outside / "none")
    (root / "data" / "self").symlink_to(root / "data" / "self")
    both = ("data/a.csv", "data/file.csv", "data/inside/b.csv")
    for pattern in ("data", "data/**", "data/**/*.csv", "data/**/*"):
        assert project(root, f"data: ['{pattern}']").data == both
    for pattern in ("named", "named/**/*", "named/**"):
        assert project(root, f"data: ['{pattern}']").data == ("named/c.csv", "named/deep/d.csv")
    assert project(root, "data: [named/*.csv, data/a.csv]").data == ("named/c.csv", "data/a.csv")
    for pattern in ("**", "**/*", "*", "na*", "*/*", "*/deep/*", "**/*.csv"):
        with pytest.raises(ConfigError, match=r"pipe.yaml:1:8: data.0: 'named' is a link to .*outside, out of the pr"):
            project(root, f"data: ['{pattern}']")
    (root / "named").unlink()
    (root / "named").symlink_to("/")
    for pattern in ("named", "named/**", "named/*"):
        with pytest.raises(ConfigError, match=r"it leads to /, which holds the project itself"):
            project(root, f"data: ['{pattern}']")
    with pytest.raises(ConfigError, match="'named' is a link to /, out of the project"):
        project(root, "data: ['**/*']")


def test_data_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerline.pipeline.keys.patterns.FILES", 3)
    (tmp_path / "d").mkdir()
    for i in range(4):
        (tmp_path / "d" / f"{i}.csv").touch()
    with pytest.raises(ConfigError, match="more than 3 files match, saw 'd'"):
        project(tmp_path, "data: [d]")
    for i in range(4):
        (tmp_path / "e" / str(i)).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"it goes through more than 3 folders"):
        project(tmp_path, "data: ['e/**']")
    with pytest.raises(ConfigError, match="whole part of a path"):
        project(tmp_path, "data: ['**d']")


# text -> the error
FOREIGN = {
    "source: {epochs: " + "9" * 5000 + "}": "pipe.yaml:1:18: an integer of 5000 characters, expected at most 40",
    "source: {epochs: " + "9" * 30 + "}": "pipe.yaml:1:10: source.epochs: expected an integer of 64 bits, saw 9999",
    "source: {sizes: {1: -9223372036854775809}}": "pipe.yaml:1:18: source.sizes.1: expected an integer of 64 bits",
    "source: {layers: [{warmup: 18446744073709551616}]}": "pipe.yaml:1:20: source.layers.0.warmup: expected an integer",
    'name: "a\\0b"': "pipe.yaml:1:7: a text with a NUL character",
    'name: "\\ud800"': "pipe.yaml:1:7: a text with a NUL character or half of a surrogate pair",
    'task: "a\\e[31m"': "",
    '"a\\e[2J\\n": 1': "pipe.yaml:1:1: a\\x1b[2J\\x0a: unknown key",
    "a0: &a0 [1, 1, 1]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(30)): "pipe.yaml:12:22: it stands for more",
    "#" * (1 << 18): "pipe.yaml: it has 262144 characters, expected at most 131072",
    "source: {rate: 2020-13-45}": "pipe.yaml:1:16: not valid YAML: ValueError: month must be in 1..12",
}


@pytest.mark.parametrize("text", FOREIGN)
def test_what_a_stranger_may_write(text: str, tmp_path: Path) -> None:
    if not FOREIGN[text]:
        project(tmp_path, text)
        return
    with pytest.raises(ConfigError) as caught:
        project(tmp_path, text)
    assert str(caught.value).startswith(FOREIGN[text])
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_pipe_yaml_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe.yaml: it is no file"):
        load(tmp_path)
    (tmp_path / "pipe.yaml").unlink()
    (tmp_path / "pipe.yaml").write_bytes(b"# " + "é".encode() * (1 << 19))
    with pytest.raises(ConfigError, match=r"pipe.yaml: it is larger than 524288 bytes"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------ --set


def test_set_puts_values_over_the_file(tmp_path: Path) -> None:
    text = "source:\n  rate: 1\n  layers: [{warmup: 1}, {warmup: 2}]\n  sizes: {1: 2}\n"
    sets = [
        "source.rate=3",
        "source.epochs=4",
        "source.schedule.warmup=5",
        "source.layers.1.warmup=6",
        "source.sizes.1=7",
    ]
    stage = source(tmp_path, text, *sets)
    assert (stage.rate, stage.epochs, stage.schedule.warmup, stage.sizes) == (3.0, 4, 5, {1: 7})
    assert [layer.warmup for layer in stage.layers] == [1, 6]
    assert source(tmp_path, text, "source.layers=[{warmup: 9}]").layers == (fakes.Schedule(warmup=9),)
    assert source(tmp_path, text, "source={epochs: 2}").rate == 1.0
    assert source(tmp_path, text, "source.ignored=a=b").ignored == "a=b"
    assert source(tmp_path, text, "source.ignored='1'").ignored == "1"
    assert source(tmp_path, text, "source.epochs=2", "source.epochs=3").epochs == 3
    assert project(tmp_path, text, "name=other").name == "other"


SET_ERRORS = {
    "source.epochs": "--set: expected key=value, saw 'source.epochs'\n  for example: --set train.epochs=2",
    "=3": "--set: expected key=value, saw '=3'",
    ".epochs=3": "--set: expected key=value, saw '.epochs=3'",
    "source..epochs=3": "--set: expected key=value, saw 'source..epochs=3'",
    "source.epoch=3": "--set source.epoch=3: source.epoch: unknown field\n  did you mean 'epochs'?",
    "suorce.epochs=3": "--set suorce.epochs=3: suorce: unknown key\n  did you mean 'source'?",
    "source.epochs=ten": "--set source.epochs=ten: source.epochs: expected an integer",
    "source.epochs={": "--set source.epochs={: source.epochs: expected an integer",
    "source.epochs=": "--set source.epochs=: source.epochs: expected an integer, saw None",
    "source.epochs.x=1": "--set source.epochs.x=1: source.epochs is 5 and has no fields",
    "source.layers.3.warmup=1": "--set source.layers.3.warmup=1: source.layers.3 is not there",
    "source.layers.2=1": "--set source.layers.2=1: source.layers.2 is not there: the list has 1",
    "source.layers.x=1": "--set source.layers.x=1: source.layers.x is not there: the list has 1",
    "source=5": "--set source=5: source: expected the fields of stage source, saw 5",
    "name=5": "--set name=5: name: expected text, saw 5",
    "source.x=" + "9" * 5000: "--set source.x=9999",
    "source.²=1": "--set source.²=1: source.²: unknown field",
    "9" * 5000 + "=1": "--set 9999",
    "source.layers.99999999999999999999=1": "--set source.layers.99999999999999999999=1: source.layers.9999",
    "source=" + "[" * 3000: "--set source=[[[",
    "source=[" + "&a [*b]," * 3: "--set source=[&a [*b],&a [*b],&a [*b],: source: expected the fields",
    "a\x1b[2J=1": "--set a\\x1b[2J=1: a\\x1b[2J: unknown key",
    "warmup=1": "--set warmup=1: warmup: unknown key\n  did you mean source.schedule.warmup or ",
    "source.warmup=1": "--set source.warmup=1: source.warmup: unknown field\n  did you mean source.schedule.warmup or ",
    "SOURCE.epochs=1": "--set SOURCE.epochs=1: SOURCE: unknown key\n  did you mean 'source'?",
    "epoch=1": "--set epoch=1: epoch: unknown key\n  did you mean source.epochs",
    "judge.epochs=1": "--set judge.epochs=1: judge.epochs: unknown field\n  did you mean source.epochs",
    "data=[no.csv]": "--set data=[no.csv]: data.0: no file matches 'no.csv'",
}


def test_bytes_of_a_set_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("train: {epochs: 1}\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path, ["name=a\udcff"])


@pytest.mark.parametrize("text", SET_ERRORS)
def test_a_mistake_in_set_is_told_as_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        project(tmp_path, "source:\n  epochs: 5\n  layers: [{warmup: 1}]\n", text)
    assert str(caught.value).startswith(SET_ERRORS[text])


def test_a_mistake_in_the_file_is_not_blamed_on_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pipe.yaml:2:3: source.epoch"):
        project(tmp_path, "source:\n  epoch: 5\n", "source.rate=2")


# ------------------------------------------------------------------------------------------------ stages


def test_stages_that_are_asked_for_come_in_the_order_of_what_they_take(tmp_path: Path) -> None:
    assert [s.name for s in project(tmp_path, "fault:\nslow:\n").stages] == [
        "source",
        "double",
        "judge",
        "fault",
        "slow",
    ]


def test_two_starting_points_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stage_table.names() | {"import-other": stage_table.names()["import-numbers"]}
    monkeypatch.setattr(stage_table, "names", lambda: found)
    with pytest.raises(
        ConfigError, match=r"^pipe.yaml:2:1: import-other: the project already starts at import-numbers"
    ):
        project(tmp_path, "import-numbers: {file: a}\nimport-other: {file: b}\n")


def test_a_stage_that_takes_what_nothing_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_table, "BUILT_IN", {"double": stage_table.BUILT_IN["double"]})
    with pytest.raises(ConfigError, match="stage double takes numbers, which no earlier stage gives"):
        project(tmp_path, "")


def test_two_stages_that_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stage_table.names() | {"twin": stage_table.names()["double"]}
    monkeypatch.setattr(stage_table, "names", lambda: found)
    with pytest.raises(ConfigError, match="both give 'doubled'"):
        project(tmp_path, "twin: {}\n")


@pytest.mark.parametrize(
    "place", ["no_such_package.stages:Stage", "tests.pipeline.fakes:NoSuchStage", "tests.pipeline.fakes:", "a b:c", ""]
)
def test_another_distribution_s_stage_that_is_not_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_table, "names", lambda: stage_table.BUILT_IN | {"other": place})
    with pytest.raises(Unavailable, match=r"entry point layerline\.stages: other = .*: (stage other can't|it is no)"):
        project(tmp_path, "other: {}\n")


@pytest.mark.parametrize(
    "code", ["raise RuntimeError('boom')", "import sys; sys.exit(0)", "raise GeneratorExit", "1 +", "Stage = 5", "\0"]
)
def test_whatever_a_foreign_stage_raises_on_import_names_its_entry_point(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "foreign_stage.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_stage", raising=False)
    monkeypatch.setattr(stage_table, "names", lambda: stage_table.BUILT_IN | {"other": "foreign_stage:Stage"})
    with pytest.raises(Unavailable, match=r"entry point .*other = foreign_stage:Stage"):
        project(tmp_path / "project", "other: {}\n")


def test_a_hint_imports_no_foreign_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "foreign_stage.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_stage", raising=False)
    monkeypatch.setattr(stage_table, "names", lambda: stage_table.BUILT_IN | {"other": "foreign_stage:Stage"})
    with pytest.raises(ConfigError, match="unknown key"):
        project(tmp_path / "project", "factor: 3\n")
    assert stage_table.imported("other") is None and stage_table.imported("double") is not None
    assert not (tmp_path / "RAN").exists()


def test_a_file_whose_name_is_no_utf_8_counts(folder: fakes.Folder) -> None:
    (folder.root / os.fsdecode(b"\xff.csv")).write_text("1")
    sets = ["data=['*.csv']"]
    assert folder.ran(None, *sets)
    record = folder.runner(*sets).ledger.head("source")
    assert record is not None and "file.\\udcff.csv" in record.parts
    assert folder.ran(None, *sets) == []


def test_a_stage_of_another_package_stands_in_for_a_standard_one(tmp_path: Path) -> None:
    project_ = project(tmp_path, "double: {use: treble, factor: 5, offset: 1}")
    assert [s.name for s in project_.stages] == ["source", "double", "judge"]
    stage = project_.stage("double")
    assert isinstance(stage, fakes.Treble)
    assert (stage.factor, stage.offset, stage.implementation) == (5, 1, "treble")
    assert fakes.Treble.name == "treble"  # the registered class itself is unchanged


def test_without_stages_of_other_packages_the_hint_says_how_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_table, "names", lambda: dict(stage_table.BUILT_IN))
    with pytest.raises(ConfigError, match="no stage is registered as 'my-int8'") as caught:
        stage_table.stand_in("quantize", "my-int8")
    assert caught.value.hint.startswith("install the package") and "entry point layerline.stages" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "place", "what", "hint"),
    [
        ("double:\n  use: trebel", "pipe.yaml:2:3", "no stage is registered as 'trebel'", "'treble'"),
        ("double:\n  use: slow", "pipe.yaml:2:3", "stage slow gives 'slowed'", "gives = 'doubled'"),
        ("double:\n  use: 5", "pipe.yaml:2:3", "expected the name of a stage, saw 5", ""),
        ("double:\n  use: treble\n  ofset: 1", "pipe.yaml:3:3", "unknown field", "'offset'"),
    ],
)
def test_a_stand_in_that_does_not_fit_is_an_error(text: str, place: str, what: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        project(tmp_path, text)
    assert caught.value.where == place
    assert what in caught.value.what and hint in caught.value.hint
