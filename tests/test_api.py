"""docs/api.md: every public name is shown, and the examples run as they stand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import onnx
import pytest

import layerline
from layerline import Work
from layerline.export import probe_files
from layerline.pipeline import stage_table
from layerline.pipeline.config.project import load
from layerline.pipeline.task import Task
from layerline.views.terminal import Silent

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text("utf-8")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's examples as one module, run in a folder of its own."""
    folder = tmp_path_factory.mktemp("api")
    source = folder / "api_example.py"
    source.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), "utf-8")
    spec = importlib.util.spec_from_file_location("api_example", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "api_example", module)
        spec.loader.exec_module(module)
    return module


def test_the_examples_run(example: ModuleType) -> None:
    folder = Path(str(example.__file__)).parent
    types = [node.op_type for node in onnx.load(str(folder / "int8.onnx")).graph.node]
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(types)
    assert (folder / "last.safetensors").is_file()


def test_every_public_name_is_shown() -> None:
    shown = set(re.findall(r"\w+", PAGE))
    assert set(layerline.__all__) - {"__version__"} <= shown
    assert all(hasattr(layerline, name) for name in layerline.__all__)
    assert set(layerline.__all__) <= set(dir(layerline))


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, layerline\n"
        "from layerline import StageError\n"
        "print(sorted({'torch', 'onnx', 'numpy', 'pydantic'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = layerline.quantise  # type: ignore[attr-defined]


def test_the_stage_of_the_page_stands_in_for_quantize(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "api_example", example)
    monkeypatch.setattr(stage_table, "names", lambda: {**stage_table.BUILT_IN, "my-int8": "api_example:Int8"})
    yaml = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert yaml is not None
    (tmp_path / "pipe.yaml").write_text(yaml.group(1))
    project = load(tmp_path)
    assert [s.name for s in project.stages] == ["train", "ema", "export", "fuse", "quantize", "engine"]
    stage = project.stage("quantize")
    assert isinstance(stage, example.Int8) and stage.least_db == 25

    for folder in ("fused", "out", "scratch"):
        (tmp_path / folder).mkdir()
    onnx.save(example.fused.model, str(tmp_path / "fused" / "model.onnx"))
    probe_files.save(tmp_path / "fused", example.feeds)
    inputs = {"model": tmp_path / "fused"}
    task = Task(tmp_path / "task.py")
    work = Work(inputs=inputs, task=task, out=tmp_path / "out", scratch=tmp_path / "scratch", log=Silent())
    report = stage.run(work)
    assert report.passed and report.stage == "quantize"
    assert report.metrics["worst_db"] == min(row.sqnr_db for row in report.records)
