"""Proof that a resumed run goes on bit for bit: the same steps in one process, and split over two.

`make` names a function that builds everything anew and returns (ModelOptimizer, step): `package.module:function` or
`path/to/file.py:function`. Each run has a process of its own, so that nothing but the checkpoint can be carried over.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training import checkpoint, tensorfile

if TYPE_CHECKING:
    from layerline.training.optimizer import ModelOptimizer

Made = tuple["ModelOptimizer", Callable[[], object]]


@dataclass(frozen=True)
class Proof:
    """What the comparison found.

    Attributes:
        steps: calls of step() after the checkpoint.
        compared: tensors compared, besides all counters.
        first_difference: the first tensor or counter that differs; empty when all are equal.
    """

    steps: int
    compared: int
    first_difference: str = ""

    @property
    def passed(self) -> bool:
        return not self.first_difference

    def __str__(self) -> str:
        if self.passed:
            return f"all {self.compared} tensors are equal after {self.steps} steps in a fresh process"
        return f"{self.first_difference} differs first, after {self.steps} steps in a fresh process"


def prove(make: str, steps: int, *, arguments: dict[str, Any] | None = None) -> Proof:
    """Runs `steps` calls of step(), saves, runs as many again; then a fresh process loads and runs the second half.

    Args:
        make: what to build, see above.
        steps: calls of step() in each half.
        arguments: keyword arguments of the function; plain data.

    Raises:
        StageError: a run failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        middle, straight, resumed = (Path(folder) / f"{n}.safetensors" for n in ("middle", "straight", "resumed"))
        _spawn({"make": make, "arguments": arguments or {}, "steps": steps, "save": [str(middle), str(straight)]})
        _spawn(
            {"make": make, "arguments": arguments or {}, "steps": steps, "load": str(middle), "save": [str(resumed)]}
        )
        return _compare(straight, resumed, steps)


def _spawn(job: dict[str, Any]) -> None:
    done = subprocess.run(  # noqa: S603  (this interpreter, this module)
        [sys.executable, "-m", "layerline.training.prove", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise StageError(f"the run in a fresh process failed: {lines[-1]}", where=job["make"])


def _compare(straight: Path, resumed: Path, steps: int) -> Proof:
    (a, meta_a), (b, meta_b) = tensorfile.load(straight), tensorfile.load(resumed)
    names = [*a, *(n for n in b if n not in a)]
    for name in names:
        same = name in a and name in b and a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        if not same or tensorfile.raw_bytes(a[name]) != tensorfile.raw_bytes(b[name]):
            return Proof(steps, len(names), name)
    return Proof(steps, len(names), _first_change(meta_a, meta_b))


def _first_change(a: Any, b: Any, path: str = "") -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(k for k in b if k not in a)]
        return next((c for k in keys if (c := _first_change(a.get(k), b.get(k), f"{path}/{k}"))), "")
    return "" if a == b else path.lstrip("/")


def _function(make: str) -> Callable[..., Made]:
    place, _, name = make.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ConfigError("there is no such file", where=place)
        sys.path.insert(0, str(Path(place).parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[..., Made] = getattr(module, name)
    return function


def main() -> None:
    """One run of a proof; the job is the command line's one argument."""
    job = json.loads(sys.argv[1])
    mo, step = _function(job["make"])(**job["arguments"])
    if "load" in job:
        mo.load_ckpt(job["load"])
    for path in job["save"]:
        for _ in range(job["steps"]):
            step()
        # Rows hold measured times, which no run repeats.
        checkpoint.save(mo, Path(path), timings=path == job["save"][0] and len(job["save"]) > 1)


if __name__ == "__main__":
    main()
