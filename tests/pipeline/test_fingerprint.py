"""Edit -> which hooks change. A missed change is a stale result, so what can't be followed must count."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from layerline.pipeline.errors import TaskError
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys.fingerprint import ABSENT, Fingerprint, Reader

HOOKS = ("model", "train_data", "loss", "eval_data", "metric")
ALL = set(HOOKS)
Files = dict[str, str]

BASE = {
    "task.py": """
        \"\"\"A task.\"\"\"
        import math
        from typing import Any

        import helper
        from layers import Net, init as initialize
        from nets import blocks

        WIDTH = 8
        NAMES = ("zero", "one")


        def model() -> Any:
            # The network.
            return initialize(Net(WIDTH, blocks.block))


        def train_data():
            return helper.load("train")


        def loss(net, batch):
            return math.sqrt(net(batch))


        def eval_data():
            return helper.load("eval")


        def metric(outputs, targets):
            \"\"\"Share of right answers.\"\"\"
            right = [o == t for o, t in zip(outputs, targets)]
            return {NAMES[0]: scale(sum(right))}


        def scale(x):
            return x / 2


        if __name__ == "__main__":
            print(model())
    """,
    "helper.py": """
        import os

        SIZES = {"train": 3, "eval": 2}


        def load(which, *, copies=1):
            return count(which) * copies


        def count(which):
            return SIZES[which]


        def metric_only(x):
            return x
    """,
    "layers.py": """
        class Base:
            def forward(self, x):
                return x


        class Net(Base):
            width = 3

            def __init__(self, *args):
                self.args = args

            def run(self, x):
                return self.forward(x)


        class Other(Base):
            pass


        def init(net):
            return net
    """,
    "nets/__init__.py": "",
    "nets/blocks.py": """
        from .parts import part
        from . import extra


        def block(x):
            return part(x)


        def spare(x):
            return extra.more(x)
    """,
    "nets/parts.py": "def part(x):\n    return x + 1\n",
    "nets/extra.py": "def more(x):\n    return x + 2\n",
}


def write(root: Path, files: Files) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root / "task.py"


def prints(root: Path, files: Files, hooks: tuple[str, ...] = HOOKS) -> dict[str, Fingerprint]:
    reader = Reader(write(root, files), Hasher(root / "memo.json"))
    return {hook: reader.hook(hook) for hook in hooks}


def changed(tmp_path: Path, before: Files, after: Files) -> set[str]:
    old, new = prints(tmp_path / "before", before), prints(tmp_path / "after", after)
    return {hook for hook in HOOKS if old[hook].digest != new[hook].digest}


def edit(files: Files, name: str, old: str, new: str) -> Files:
    text = dedent(files[name])
    assert old in text, f"{old!r} is not in {name}"
    return files | {name: text.replace(old, new)}


EDITS = {
    "a comment": ("task.py", "# The network.", "# A network, much better.", set()),
    "blank lines": ("task.py", "WIDTH = 8\n", "WIDTH = 8\n\n\n", set()),
    "layout": ("task.py", "NAMES = (", "NAMES  =  (  # names\n    ", set()),
    "quotes": ("task.py", '"zero"', "'zero'", set()),
    "a hexadecimal number": ("task.py", "WIDTH = 8", "WIDTH = 0x8", set()),
    "a docstring": ("task.py", "Share of right", "Fraction of right", set()),
    "a module's docstring": ("task.py", "A task.", "The task.", set()),
    "a new docstring": ("task.py", "def scale(x):\n", 'def scale(x):\n    """Halves."""\n', set()),
    "the main guard": ("task.py", "print(model())", "print(train_data())", set()),
    "an unused import": ("helper.py", "import os\n", "import sys\n", set()),
    "metric's body": ("task.py", "o == t", "o is t", {"metric"}),
    "metric's helper": ("task.py", "x / 2", "x / 3", {"metric"}),
    "metric's constant": ("task.py", '"zero"', '"nought"', {"metric"}),
    "loss": ("task.py", "net(batch)", "2 * net(batch)", {"loss"}),
    "a type hint": ("task.py", "-> Any", "-> object", {"model"}),
    "a constant": ("task.py", "WIDTH = 8", "WIDTH = 9", {"model"}),
    "an int to a float": ("task.py", "WIDTH = 8", "WIDTH = 8.0", {"model"}),
    "an int to text": ("task.py", "WIDTH = 8", "WIDTH = '8'", {"model"}),
    "an import's source": ("task.py", "import math", "import cmath as math", {"loss"}),
    "a function of a module": ("helper.py", "count(which) *", "2 * count(which) *", {"train_data", "eval_data"}),
    "a default argument": ("helper.py", "copies=1", "copies=2", {"train_data", "eval_data"}),
    "a function behind it": ("helper.py", "SIZES[which]", "SIZES[which] + 1", {"train_data", "eval_data"}),
    "a constant behind it": ("helper.py", '"train": 3', '"train": 4', {"train_data", "eval_data"}),
    "a function nobody reaches": ("helper.py", "return x", "return -x", set()),
    "a method": ("layers.py", "return self.forward(x)", "return -self.forward(x)", {"model"}),
    "a class attribute": ("layers.py", "width = 3", "width = 4", {"model"}),
    "a base class": ("layers.py", "        return x\n", "        return -x\n", {"model"}),
    "another class": ("layers.py", "class Other(Base):\n    pass", "class Other(Base):\n    y = 1", set()),
    "an import by another name": ("layers.py", "    return net", "    return (net,)", {"model"}),
    "through a package": ("nets/blocks.py", "return part(x)", "return part(-x)", {"model"}),
    "through a relative import": ("nets/parts.py", "x + 1", "x + 3", {"model"}),
    "an unreached relative import": ("nets/extra.py", "x + 2", "x + 3", set()),
    "a package that does something": ("nets/__init__.py", "", "import os\nos.environ['A'] = '1'\n", ALL),
    "a package that defines something": ("nets/__init__.py", "", "A = 1\n", set()),
    "a seed": ("task.py", "WIDTH = 8", "import random\nrandom.seed(1)\nWIDTH = 8", ALL),
    "a new hook": ("task.py", "def scale", "def calib_data(): return 1\n\n\ndef scale", set()),
    "the order of functions": ("helper.py", "def metric_only", "def another(): pass\n\n\ndef metric_only", set()),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_the_hooks_that_reach_it(name: str, tmp_path: Path) -> None:
    file, old, new, expected = EDITS[name]
    if not old:
        after = BASE | {file: new}
    else:
        after = edit(BASE, file, old, new)
    assert changed(tmp_path, BASE, after) == expected


@dataclass(frozen=True)
class Case:
    """Files, an edit of one, and the hooks that must change."""

    what: str
    files: Files
    edited: str
    old: str
    new: str
    hooks: set[str]


def read_cases(path: Path) -> list[Case]:
    cases = []
    for text in path.read_text().split("\n# ")[1:]:
        what, *parts = text.split("\n-- ")
        *files, (edited, old), (_, new), (hooks, _) = (p.partition("\n")[::2] for p in parts)
        changes = hooks.removeprefix("changes ").split()
        which = ALL if changes == ["all"] else set(changes) - {"nothing"}
        cases.append(Case(what, dict(files), edited.removeprefix("edit "), old, new, which))
    return cases


CASES = read_cases(Path(__file__).with_name("fingerprint_cases.txt"))


@pytest.mark.parametrize("case", CASES, ids=[c.what for c in CASES])
def test_what_is_hard_to_follow(case: Case, tmp_path: Path) -> None:
    seen = prints(tmp_path / "hooks", case.files)
    expected = {hook for hook in case.hooks if seen[hook] != ABSENT}
    assert changed(tmp_path, case.files, edit(case.files, case.edited, case.old, case.new)) == expected
    assert bool(expected) == bool(case.hooks)


def test_a_hook_that_the_task_does_not_define_is_absent(tmp_path: Path) -> None:
    assert prints(tmp_path, BASE, ("calib_data",))["calib_data"] == ABSENT
    assert Reader(tmp_path / "no_task.py", Hasher(tmp_path / "memo")).hook("model") == ABSENT


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    task = write(tmp_path, edit(BASE, "helper.py", "return count", "retrun count"))
    with pytest.raises(TaskError, match=r"^helper.py:8: it is not valid Python: invalid syntax"):
        Reader(task, Hasher(tmp_path / "memo")).hook("model")


@pytest.mark.parametrize("content", [b"x = 1\0", b"x = '\xff\xfe'\n", b"# -*- coding: no-such -*-\n"])
def test_a_file_that_is_no_text_is_told_as_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_bytes(content)
    with pytest.raises(TaskError, match=r"task.py.*not valid Python"):
        Reader(tmp_path / "task.py", Hasher(tmp_path / "memo")).hook("model")


@pytest.mark.parametrize("terms", [1000, 2900])
def test_a_deep_expression_that_python_compiles_is_read(terms: int, tmp_path: Path) -> None:
    files = {"task.py": f"X = {' + '.join(['1'] * terms)}\n\ndef model(): return X\n"}
    assert changed(tmp_path, files, edit(files, "task.py", "X = 1", "X = 2")) == {"model"}
    assert sys.getrecursionlimit() < 10_000


def test_a_broken_file_that_nothing_reaches_is_no_matter(tmp_path: Path) -> None:
    assert changed(tmp_path, BASE, BASE | {"scratch.py": "def (:"}) == set()


def test_a_broken_file_counts_by_its_bytes_where_any_file_may_be_reached(tmp_path: Path) -> None:
    files = {"task.py": "import importlib\n\ndef model(): return importlib.import_module('x')\n", "old.py": "print 1\n"}
    assert changed(tmp_path, files, edit(files, "old.py", "1", "2")) == {"model"}


def test_it_says_what_it_reached_and_what_counts_whole(tmp_path: Path) -> None:
    seen = prints(tmp_path, BASE)["train_data"]
    names = [r for r in seen.reached if ":import " not in r]
    assert names == ["helper.py:SIZES", "helper.py:count", "helper.py:load", "task.py:train_data"]
    assert not seen.whole

    files = {"task.py": "def small(): return 1\n\ndef model(): return globals()['small']()\n"}
    assert prints(tmp_path / "2", files)["model"].whole == {"task.py": "model uses globals"}

    files = {"task.py": "import importlib\n\ndef model(): return importlib.import_module('a')\n", "a.py": ""}
    whole = prints(tmp_path / "3", files)["model"].whole
    assert whole == {"task.py": "model uses import_module, and so does every Python file here"}


def test_a_folder_named_in_the_code_is_told(tmp_path: Path) -> None:
    files = {"task.py": "def train_data(): return load('images/train')\n", "images/train/1.png": "x"}
    assert prints(tmp_path, files)["train_data"].folders == ("images/train",)


def test_the_folder_it_lies_in_does_not_matter(tmp_path: Path) -> None:
    assert changed(tmp_path, BASE, BASE) == set()


def test_a_data_file_is_known_by_its_content(tmp_path: Path) -> None:
    files = {"task.py": "def train_data(): return open('x.csv')\n", "x.csv": "1"}
    task = write(tmp_path / "project", files)
    first = Reader(task, Hasher(tmp_path / "memo")).hook("train_data")
    assert list(first.files) == ["x.csv"]
    (tmp_path / "elsewhere.csv").write_text("1")
    (tmp_path / "project" / "x.csv").unlink()
    (tmp_path / "project" / "x.csv").symlink_to(tmp_path / "elsewhere.csv")  # data often is a link to a big disk
    assert Reader(task, Hasher(tmp_path / "memo")).hook("train_data") == first
    (tmp_path / "elsewhere.csv").write_text("2")
    assert Reader(task, Hasher(tmp_path / "memo")).hook("train_data").digest != first.digest


def test_a_file_outside_counts_and_its_place_is_not_told(tmp_path: Path) -> None:
    outside = tmp_path / "disk" / "x.csv"
    outside.parent.mkdir()
    outside.write_text("1")
    files = {
        "task.py": f"def train_data(): return open({str(outside)!r})\n\ndef eval_data(): return open('../disk/x.csv')\n"
    }
    task = write(tmp_path / "project", files)
    before = {h: Reader(task, Hasher(tmp_path / "memo")).hook(h) for h in ("train_data", "eval_data")}
    outside.write_text("2")
    for hook, seen in before.items():
        assert Reader(task, Hasher(tmp_path / "memo")).hook(hook).digest != seen.digest
        assert str(tmp_path) not in str(seen)


@pytest.mark.parametrize(
    "text", ["/proc/self/stat", ".layerline/x.txt", ".git/HEAD", "x" * 250 + "é" * 5, "a\0b", "..", "/"]
)
def test_strings_that_name_no_data(text: str, tmp_path: Path) -> None:
    files = {"task.py": f"def model(): return {text!r}\n", ".layerline/x.txt": "1", ".git/HEAD": "1"}
    assert not prints(tmp_path, files)["model"].files


def test_files_that_a_pattern_matches_count_when_they_come_and_go(tmp_path: Path) -> None:
    files = {
        "task.py": "import glob\n\ndef train_data(): return glob.glob('data/*.txt')\n\ndef metric(o, t): return 0\n",
        "data/a.txt": "1",
    }
    assert changed(tmp_path / "new", files, files | {"data/b.txt": ""}) == {"train_data"}
    assert changed(tmp_path / "gone", files | {"data/b.txt": ""}, files) == {"train_data"}
    assert changed(tmp_path / "other", files, files | {"data/b.csv": ""}) == set()


def test_more_files_than_are_read_count_by_name_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerline.pipeline.keys.named_files._MATCHES", 2)
    files = {"task.py": "def train_data(): return 'data/*.txt'\n"} | {f"data/{n}.txt": "1" for n in range(4)}
    seen = prints(tmp_path / "0", files)["train_data"]
    assert list(seen.files) == ["2 more files that data/*.txt matches", "data/0.txt", "data/1.txt"]
    assert prints(tmp_path / "1", files | {"data/4.txt": "1"})["train_data"].digest != seen.digest
    assert prints(tmp_path / "2", files | {"data/3.txt": "12"})["train_data"].digest != seen.digest


def test_a_pattern_reaches_through_links_once(tmp_path: Path) -> None:
    task = write(tmp_path / "project", {"task.py": "def train_data(): return 'data/**/*.txt'\n", "data/a.txt": "1"})
    write(tmp_path / "disk", {"b.txt": "1"})
    (tmp_path / "project/data/disk").symlink_to(tmp_path / "disk")
    (tmp_path / "project/data/loop").symlink_to(tmp_path / "project/data")
    seen = Reader(task, Hasher(tmp_path / "memo")).hook("train_data")
    assert list(seen.files) == ["data/a.txt", "data/disk/b.txt"]


def test_a_module_that_a_string_names_is_told(tmp_path: Path) -> None:
    files = {"task.py": "import lib\n\ndef model(): return lib.load_part('nets.build')\n", "nets.py": "build = 1\n"}
    assert prints(tmp_path, files)["model"].whole == {"nets.py": "a string names it"}
    assert list(prints(tmp_path, files | {"nets.py": "print 1"})["model"].files) == ["nets.py"]


def test_a_package_of_the_project_that_is_installed_in_place_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "task.py": "from mylib_in_place.nets import net\n\ndef model(): return net()\n",
        "src/mylib_in_place/__init__.py": "",
        "src/mylib_in_place/nets.py": "from .parts import part\n\ndef net(): return part()\n",
        "src/mylib_in_place/parts.py": "def part(): return 1\n",
    }
    task = write(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    before = Reader(task, Hasher(tmp_path / "memo")).hook("model")
    write(tmp_path, edit(files, "src/mylib_in_place/parts.py", "return 1", "return 2"))
    after = Reader(task, Hasher(tmp_path / "memo")).hook("model")
    assert "src/mylib_in_place/parts.py:part" in after.reached
    assert before.digest != after.digest


def test_an_environment_inside_the_project_is_not_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "task.py": "import lib_of_venv, importlib\n\ndef model(): return importlib.import_module('lib_of_venv')\n",
        "venv/pyvenv.cfg": "",
        "venv/lib/site-packages/lib_of_venv.py": "X = 1\n",
    }
    task = write(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path / "venv/lib/site-packages"))
    before = Reader(task, Hasher(tmp_path / "memo")).hook("model")
    write(tmp_path, edit(files, "venv/lib/site-packages/lib_of_venv.py", "X = 1", "X = 2"))
    assert Reader(task, Hasher(tmp_path / "memo")).hook("model") == before


def test_links_keep_their_place_in_the_project(tmp_path: Path) -> None:
    write(
        tmp_path / "shared",
        {"task.py": "import net\n\ndef model(): return net.f()\n", "pkg/x.py": "def f(): return 1\n"},
    )
    project = tmp_path / "project"
    write(project, {"net.py": "from pkg.x import f\n"})
    (project / "task.py").symlink_to(tmp_path / "shared" / "task.py")
    (project / "pkg").symlink_to(tmp_path / "shared" / "pkg")
    before = Reader(project / "task.py", Hasher(tmp_path / "memo"), project).hook("model")
    assert [r for r in before.reached if ":import" not in r] == ["pkg/x.py:f", "task.py:model"]
    write(tmp_path / "shared", {"pkg/x.py": "def f(): return 2\n"})
    assert Reader(project / "task.py", Hasher(tmp_path / "memo"), project).hook("model").digest != before.digest


def test_a_compiled_module_of_the_project_counts_by_its_bytes(tmp_path: Path) -> None:
    files = {
        "task.py": "from ops import fast\n\ndef model(): return fast.f()\n",
        "ops/fast.abi3.so": "1",
        "ops/__init__.py": "",
    }
    assert changed(tmp_path, files, files | {"ops/fast.abi3.so": "2"}) == {"model"}


@pytest.mark.parametrize("name", ["fast.abi3.so", "fast.pyc", "fast/__init__.pyc"])
def test_a_module_without_source_counts_however_it_is_imported(name: str, tmp_path: Path) -> None:
    files = {"task.py": "from fast import f\n\ndef model(): return f()\n", name: "1"}
    assert changed(tmp_path, files, files | {name: "2"}) == {"model"}


def test_a_task_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write(
        tmp_path / "tasks",
        {"task.py": "from net import f\n\ndef model(): return f(), 'data/x'\n", "net.py": "def f(): pass\n"},
    )
    write(tmp_path, {"data/x": "1"})
    seen = Reader(tmp_path / "tasks" / "task.py", Hasher(tmp_path / "memo"), tmp_path).hook("model")
    assert "tasks/net.py:f" in seen.reached
    assert list(seen.files) == ["data/x"]


STATEMENTS = (
    "{a} = [{k}]",
    "{a} = {b}",
    "{a} = [{b}, {k}]",
    "{a} = {b}[:1]",
    "{a}, {b} = {b}, [{k}]",
    "{a}.append({k})",
    "{a}[0] = {k}",
    "{a} += [{k}]",
    "del {a}[{k}:]",
    "for x in ({a}, {b}):\n    x.append({k})",
    "for {a} in ([{k}], [1]):\n    {b}.append({a})",
    "[x.append({k}) for x in ({a},)]",
    "({a} := [{k}]).append({b})",
    "if len({a}) > {k}:\n    {b} = [{k}]\nelse:\n    {b} = [0]",
    "try:\n    {a} = [{b}[{k}]]\nexcept IndexError:\n    {a} = [{k}]",
    "{a} = {f}()",
    "_ = {f}()",
    "{f}()",
    "{f} = {g}",
    "{f} = lambda: [{a}, {k}]",
    "def {f}():\n    return [{a}, {k}]",
    "def {f}(x={a}):\n    return [x, {k}]",
    "def {f}():\n    {a}.append({k})\n    return {b}",
    "def {f}():\n    global {a}\n    {a} = [{k}]\n    return {b}",
    "def {f}(*x):\n    {a}.append(x)\n    return x[0] if x else [{k}]",
    "@{f}\ndef {g}(*x):\n    return [{k}]",
    "class {f}(list):\n    kept = {a}\n    kept.append({k})",
    "class {f}(list):\n    def __init__(self):\n        self.extend([{a}, {k}])",
    "{f}.seen = {k}",
    "def {f}({a}=None):\n    return [{a}, {b}, {k}]",
    "def {f}(x=lambda {a}: {a}):\n    return x({a})",
    "def {f}():\n    {a} = [{k}]\n    def {g}():\n        return {a}\n    return {g}()",
    "def {f}():\n    def inner():\n        {a} = [{k}]\n        return {a}\n    return [inner(), {a}]",
    "def {f}():\n    def inner():\n        global {a}\n        {a} = [{k}]\n    inner()\n    return {a}",
    "def {f}({a}=[{k}]):\n    class K:\n        {a} = {a}\n    return K.{a}",
    "def {f}():\n    return [{a} for {a} in ({b}, [{k}])] + {a}",
    "{f} = lambda {a}=[{k}]: [{a}, {b}]",
)
LINES = st.lists(
    st.builds(
        lambda text, a, b, f, g, k: text.format(a=a, b=b, f=f, g=g, k=k),
        st.sampled_from(STATEMENTS),
        *([st.sampled_from("ABC")] * 2),
        *([st.sampled_from("fgh")] * 2),
        st.integers(0, 2),
    ),
    min_size=2,
    max_size=7,
)
START = "A = [0]\nB = [0]\nC = [0]\n\n\ndef f(*x): return [0]\n\n\ndef g(*x): return [0]\n\n\ndef h(*x): return [0]\n"


def result(source: str) -> str | None:
    """What model() gives after the module was imported, None when it raises."""
    names: dict[str, Any] = {"__name__": "task"}
    try:
        exec(compile(source, "task.py", "exec"), names)
        return repr(names["model"]())
    except Exception:
        return None


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(LINES, LINES, st.data())
def test_an_edit_that_changes_the_result_changes_the_fingerprint(
    tmp_path: Path, lines: list[str], others: list[str], data: st.DataObject
) -> None:
    """Soundness, on modules nobody would write: the edit may be anything, in any place."""
    name, function = data.draw(st.sampled_from("ABC")), data.draw(st.sampled_from("fgh"))
    end = f"def model():\n    return [{name}, {function}(), getattr(f, 'seen', None)]\n"
    place = data.draw(st.integers(0, len(lines) - 1))
    edited = data.draw(
        st.sampled_from(
            [
                [*lines[:place], others[0], *lines[place + 1 :]],  # one replaced
                [*lines[:place], others[0], *lines[place:]],  # one put in
                [*lines[:place], *lines[place + 1 :]],  # one left out
                [*lines[: place - 1], *lines[place - 1 : place + 1][::-1], *lines[place + 1 :]],  # two swapped
            ]
        )
    )
    before, after = ("\n".join([START, *body, end]) for body in (lines, edited))
    results = result(before), result(after)
    assume(None not in results and "0x" not in str(results))
    if results[0] != results[1]:
        prints_of = [
            prints(tmp_path / "project", {"task.py": text}, ("model",))["model"].digest for text in (before, after)
        ]
        assert prints_of[0] != prints_of[1], (before, after, results)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES)
def test_layout_changes_nothing(tmp_path: Path, lines: list[str]) -> None:
    text = "\n".join([START, *lines, "def model():\n    return [A, B, C, f(), g(), h()]\n"])
    loose = "# a comment\n" + ast.unparse(ast.parse(text)).replace("\n", "\n\n").replace("    ", "  ") + "  # another\n"
    first, second = (prints(tmp_path / "project", {"task.py": t}, ("model",))["model"] for t in (text, loose))
    assert first == second
