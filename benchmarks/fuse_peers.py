"""`fuse` beside onnxsim, onnxslim and onnxruntime's own optimisation, on the same files in the same run.

    pip install onnxsim onnxslim rapidocr-onnxruntime silero-vad swift-f0
    python benchmarks/fuse_peers.py [--models FOLDER] [--rounds N] [NAME…]

For every model and tool: nodes left (bodies included, constants not counted), whether the result is right at two sizes,
and onnxruntime's CPU latency of it (one thread and that thread's own time, so that other work on the machine doesn't
count; the runtime's own optimisations on; runs interleaved; the quickest).
Prints a table in Markdown and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuse_models
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from layerline.graph.fusion.fuse import fuse
from layerline.graph.io import onnx_files

Tool = Callable[[fuse_models.Model, Path], None]


@dataclass(frozen=True)
class Result:
    """What one tool made of one model; nodes is None where it failed, milliseconds where the result is wrong."""

    nodes: int | None
    right: bool
    seconds: float
    milliseconds: float | None = None
    note: str = ""


def ours(model: fuse_models.Model, out: Path) -> None:
    done = fuse(onnx_files.read_model(model.path), [model.feed(0), model.feed(1)])
    onnx.save(ir.to_proto(done.model), str(out))


def simplify(model: fuse_models.Model, out: Path) -> None:
    import onnxsim

    made, right = onnxsim.simplify(onnx.load(str(model.path)))
    if not right:
        raise RuntimeError("onnxsim's own check failed")
    onnx.save(made, str(out))


def slim(model: fuse_models.Model, out: Path) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(str(model.path))), str(out))


def runtime(level: Any) -> Tool:
    def tool(model: fuse_models.Model, out: Path) -> None:
        options = _options()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(out)
        ort.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])

    return tool


TOOLS: dict[str, Tool] = {
    "layerline": ours,
    "onnxsim": simplify,
    "onnxslim": slim,
    "ort basic": runtime(ort.GraphOptimizationLevel.ORT_ENABLE_BASIC),
    "ort extended": runtime(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
}


def _options() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def compare(model: fuse_models.Model, folder: Path, rounds: int) -> dict[str, Result]:
    """Every tool on one model."""
    paths = {"unfused": model.path} | {name: folder / f"{name.replace(' ', '_')}.onnx" for name in TOOLS}
    results = {"unfused": Result(_nodes(model.path), True, 0.0)}
    for name, tool in TOOLS.items():
        start = time.perf_counter()
        try:
            tool(model, paths[name])
            spent = time.perf_counter() - start
            results[name] = Result(_nodes(paths[name]), _right(model, paths[name]), spent)
        except Exception as error:  # noqa: BLE001 - a peer that fails is a row of the table
            results[name] = Result(None, False, time.perf_counter() - start, note=str(error).splitlines()[0][:80])
    clocked = {n: p for n, p in paths.items() if results[n].right}
    for name, quickest in _latency(clocked, model.feed(1), rounds).items():
        results[name] = Result(results[name].nodes, True, results[name].seconds, quickest)
    return results


def _nodes(path: Path) -> int:
    model = onnx.load(str(path), load_external_data=False)
    return sum(n.op_type != "Constant" for g in onnx_files.graphs(model) for n in g.node)


def _right(model: fuse_models.Model, path: Path) -> bool:
    plain = _options()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [
        ort.InferenceSession(str(p), o, providers=["CPUExecutionProvider"])
        for p, o in ((model.path, plain), (path, _options()))
    ]
    for variant in (0, 1):
        a, b = (s.run(None, model.feed(variant)) for s in sessions)
        if not all(x.shape == y.shape and np.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(a, b, strict=True)):
            return False
    return True


def _latency(paths: dict[str, Path], feed: dict[str, Any], rounds: int) -> dict[str, float]:
    sessions = {
        n: ort.InferenceSession(str(p), _options(), providers=["CPUExecutionProvider"]) for n, p in paths.items()
    }
    taken: dict[str, list[float]] = {n: [] for n in sessions}
    for session in sessions.values():
        session.run(None, feed)
    for _ in range(rounds):
        for name, session in sessions.items():
            start = time.thread_time()
            session.run(None, feed)
            taken[name].append(1000 * (time.thread_time() - start))
    return {n: min(t) for n, t in taken.items()}


def _cell(result: Result) -> str:
    if result.nodes is None:
        return f"failed ({result.note})"
    if not result.right:
        return f"{result.nodes}, wrong"
    assert result.milliseconds is not None
    return f"{result.nodes}, {result.milliseconds:.2f} ms"


def main(names: Sequence[str], folder: Path, rounds: int) -> None:
    columns = ["unfused", *TOOLS]
    print(f"| model | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}", flush=True)
    summary: dict[str, dict[str, Any]] = {}
    for model in fuse_models.models(folder):
        if names and model.name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            results = compare(model, Path(scratch), rounds)
        print(f"| {model.name} | {' | '.join(_cell(results[c]) for c in columns)} |", flush=True)
        summary[model.name] = _verdict(results)
    fewest = [m for m, v in summary.items() if v["fewest"]]
    quick = [m for m, v in summary.items() if v["latency_over_best_peer"] <= 1.05]
    print(
        json.dumps(
            {
                "models": len(summary),
                "right": sum(v["right"] for v in summary.values()),
                "fewest_nodes": len(fewest),
                "not_fewest": sorted(set(summary) - set(fewest)),
                "within_5_percent": len(quick),
                "slower": {m: v["latency_over_best_peer"] for m, v in summary.items() if m not in quick},
                "per_model": summary,
            }
        )
    )


def _verdict(results: dict[str, Result]) -> dict[str, Any]:
    own, peers = results["layerline"], [r for n, r in results.items() if n not in ("layerline", "unfused") and r.right]
    best = min((r.milliseconds for r in peers if r.milliseconds is not None), default=None)
    return {
        "right": own.right,
        "fewest": own.nodes is not None and all(r.nodes is None or own.nodes <= r.nodes for r in peers),
        "latency_over_best_peer": round(own.milliseconds / best, 3) if own.milliseconds and best else float("inf"),
        "nodes": {n: r.nodes for n, r in results.items()},
        "seconds": {n: round(r.seconds, 2) for n, r in results.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "layerline-fuse-models")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    main(options.names, options.models, options.rounds)
