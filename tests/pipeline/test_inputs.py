"""What is filed is what was read: inputs that change under a stage, and what of its surroundings a key holds."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest

from layerline.pipeline import hashing, stage_table
from layerline.pipeline.hashing import Hasher, is_open_for_writing
from layerline.pipeline.keys import stage_code
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from tests.pipeline import fakes
from tests.pipeline.fakes import Folder

OLD, NEW = "[1, 2]", "[3, 4]"


def replace(path: Path) -> None:
    path.with_suffix(".new").write_text(NEW)
    path.with_suffix(".new").replace(path)


def rewrite(path: Path) -> None:
    path.write_text(NEW)


def keep_its_times(path: Path) -> None:
    times = path.stat()
    path.write_text(NEW)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def keep(path: Path) -> None:
    """Leaves it as it is."""


CHANGES: list[Callable[[Path], None]] = [replace, rewrite, keep_its_times, Path.unlink]


class Swapped(fakes.ImportNumbers):
    """Reads its file, while somebody changes the original and perhaps puts it back."""

    change: ClassVar[Callable[[Path], None]] = keep
    put_back: ClassVar[bool] = False
    copied: ClassVar[bool] = False

    def run(self, work: Work) -> Report:
        path = work.root / self.file
        kept = path.with_suffix(".kept")
        shutil.copy2(path, kept)
        type(self).change(path)
        read = work.sources / self.file if self.copied else path
        text = read.read_text() if read.exists() else "[]"
        if self.put_back:
            kept.replace(path)
        fakes.write(work.out / "numbers.json", json.loads(text))
        return Report(stage=self.name)


@pytest.fixture
def swapped(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setitem(fakes.ON_REQUEST, "import-numbers", f"{__name__}:Swapped")
    stage_table.stage_class.cache_clear()
    folder.write("pipe.yaml", "import-numbers: {file: sub/n.json}\n")
    folder.write("sub/n.json", OLD)
    return folder


@pytest.mark.parametrize("put_back", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_under_a_stage_is_not_filed(
    change: Callable[[Path], None], put_back: bool, swapped: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Swapped, "change", change)
    monkeypatch.setattr(Swapped, "put_back", put_back)
    (result, *_) = swapped.run(["import-numbers"]).results
    assert result.state == "failed" and result.error is not None and result.error.exit_code == 2
    assert result.error.where == "sub/n.json" and "nothing was filed" in result.error.what
    assert not list(swapped.state.glob("ledger/keys/*")) and not list(swapped.state.glob("store/*"))


@pytest.mark.parametrize("change", [replace, rewrite])
def test_a_stage_reads_the_copy_that_was_hashed(
    change: Callable[[Path], None], swapped: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(Swapped, "change", change)
    monkeypatch.setattr(Swapped, "copied", True)
    monkeypatch.setattr(
        json, "loads", lambda text, original=json.loads, **options: read.append(text) or original(text, **options)
    )
    assert not swapped.run(["import-numbers"]).passed
    assert OLD in read and NEW not in read
    monkeypatch.setattr(Swapped, "change", keep)
    swapped.write("sub/n.json", OLD)
    assert swapped.run(["import-numbers"]).passed
    assert fakes.read(swapped.artifact("import-numbers") / "numbers.json") == [1, 2]
    assert not list(swapped.state.glob("work/*/copies"))


def test_a_file_that_changes_between_its_key_and_its_copy(swapped: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = swapped.runner()
    monkeypatch.setattr(swapped.listener, "started", lambda stage, reason: replace(swapped.root / "sub" / "n.json"))
    (result, *_) = runner.run(["import-numbers"]).results
    assert str(result.error).startswith("sub/n.json: sub/n.json was changed while stage import-numbers was reading it")


HOOK = """
from pathlib import Path

def train_data():
    path = Path(__file__).with_name("extra.txt")
    kept = path.read_text()
    path.write_text("[5]")
    numbers = [len(path.read_text())]
    path.write_text(kept)
    return numbers
"""


@pytest.mark.parametrize("declared", ["", "data: [extra.txt]\n"])
def test_a_data_file_that_is_replaced_and_put_back_under_a_hook(declared: str, folder: Folder) -> None:
    folder.write("extra.txt", "[1]")
    folder.write("pipe.yaml", declared)
    folder.write("task.py", fakes.TASK + HOOK)
    (result, *_) = folder.run(["source"]).results
    assert result.error is not None and "extra.txt was replaced, touched or put back" in result.error.what
    assert not list(folder.state.glob("ledger/keys/*"))


LATER = """
from pathlib import Path

def later():
    path = Path(__file__).with_name("late.py")
    kept = path.read_text()
    path.write_text("N = 5")
    import late
    path.write_text(kept)
    return late.N
"""


def test_code_that_is_edited_for_its_import_alone(folder: Folder) -> None:
    folder.write("task.py", fakes.TASK.replace("helper.build(BIAS)", "helper.build(BIAS) * later()") + LATER)
    folder.write("late.py", "N = 1")
    (result, *_) = folder.run(["source"]).results
    assert result.error is not None and "late.py was edited" in result.error.what, result.error


# ------------------------------------------------------------------------------------------------ open files


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who has a file open")
def test_a_file_is_read_again_for_as_long_as_somebody_can_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_SETTLED_NS", 0)
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(8192))
    hasher = Hasher(None)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        file.close()
        pages[0] = 1  # the page is dirty from here on, and further writes leave no trace
        before, stamp = hasher.file(path), path.stat()
        pages[1] = 1
        assert path.stat().st_ctime_ns == stamp.st_ctime_ns and is_open_for_writing(path)
        assert hasher.changed(path) == "was changed"
        assert hasher.file(path) != before
        assert hasher.changed(path) == ""
    assert not is_open_for_writing(path)
    with path.open("rb"):
        assert not is_open_for_writing(path)


# ------------------------------------------------------------------------------------------------ hooks


def test_of_a_row_of_hooks_only_the_first_counts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("train_data", "eval_data", "calib_data")
    monkeypatch.setattr(fakes.Source, "uses", ("model", *row, "loss"))
    monkeypatch.setattr(fakes.Source, "first_of", (row,))

    def called() -> list[str]:
        return folder.runner().planner.hooks(folder.load().stage("source"))

    assert called() == ["model", "train_data", "loss"]
    folder.run()
    folder.write("task.py", fakes.TASK + "\ndef calib_data():\n    return [1]\n")
    folder.edit("task.py", "[2.0, 4.0, 6.0]", "[2.0, 4.0, 7.0]")
    assert folder.ran(["source"]) == []
    folder.edit("task.py", "def train_data():\n    return [1, 2, 3]", "train_data = None")
    assert called() == ["model", "train_data", "eval_data", "loss"]


# ------------------------------------------------------------------------------------------------ code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a stage, what the stage reaches, and what it doesn't."""
    texts = {
        "__init__.py": "def __getattr__(name):\n    from own import other\n    return other\n",
        "stage.py": "class Stage:\n    def run(self):\n        from own.deep import worker\n        worker.go()\n",
        "deep/__init__.py": "",
        "deep/worker.py": "from . import leaf\n\ndef go():\n    'Does it.'\n    return leaf.N\n",
        "deep/leaf.py": "N = 1\n",
        "other.py": "M = 1\n",
    }
    for name, text in texts.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "own"


def test_the_code_of_a_stage_is_what_it_imports(package: Path) -> None:
    stage = import_module("own.stage").Stage

    def digest() -> str:
        return stage_code.digest(stage, Hasher(None))

    before = digest()
    (package / "deep" / "worker.py").write_text("from . import leaf\ndef go():  # does it\n    return leaf.N\n")
    (package / "other.py").write_text("M = 2\n")
    assert digest() == before
    (package / "deep" / "leaf.py").write_text("N = 2\n")
    assert digest() != before
    (package / "deep" / "leaf.py").write_text("N = 1\n")
    assert digest() == before
    (package / "deep" / "__init__.py").write_text("import os\n")
    assert digest() != before
    for name in [n for n in sys.modules if n.partition(".")[0] == "own"]:
        del sys.modules[name]


def test_the_code_of_each_stage_of_ours_holds_what_it_runs_and_no_other_stage() -> None:
    names = ("train", "export", "fuse", "import_onnx")
    for name in names:
        import_module(f"layerline.stages.{name}")
    reached = {name: set(stage_code.reached(f"layerline.stages.{name}", Hasher(None))) for name in names}
    for name, modules in reached.items():
        assert {m for m in modules if m.startswith("layerline.stages.")} == {f"layerline.stages.{name}"}
    assert (
        "layerline.training.run.train_loop" in reached["train"]
        and "layerline.training.run.train_loop" not in reached["fuse"]
    )
    assert {"layerline.graph.fusion.verify_rewrites", "layerline.backends.onnxruntime"} <= reached["fuse"]
    assert "layerline.graph.fusion.verify_rewrites" not in reached["train"]


def test_a_changed_stage_runs_again_and_says_why(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()
    monkeypatch.setattr(stage_code, "digest", lambda stage, hasher: "0" * 64)
    assert folder.runner().planner.steps()[0].reason == "layerline's code of this stage changed"


def test_what_was_parsed_is_remembered_by_its_text(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run()
    monkeypatch.setattr(stage_code, "_facts", lambda *arguments: pytest.fail("it was parsed again"))
    assert folder.ran() == []
