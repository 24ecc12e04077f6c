"""Export, parity and fusion of ResNet-18 and BERT-base: seconds beside plain torch.onnx.export of the same module.

    python benchmarks/export.py [--rounds 3]

Random weights from transformers configurations; batch (and sequence) dynamic. Each run is a process of its own that has
exported a small module before the clock starts, so that imports and the exporter's own tables don't count. Plain
torch.onnx.export traces and optimises; the export stage traces, compares every value at every size and writes the
artifact; the fuse stage rewrites, proves each rewrite and compares again. Figures are medians of runs taken in turn.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESNET = """
import torch
from transformers import ResNetConfig, ResNetForImageClassification
def model():
    return ResNetForImageClassification(ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512],
                                                     depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000))
def example_inputs():
    return {"pixel_values": torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))}
"""
BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification
def model():
    return BertForSequenceClassification(BertConfig())
def example_inputs():
    ids = torch.arange(64).reshape(2, 32)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
"""
TEXT = {0: "batch", 1: "seq"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": (RESNET, {"dynamic": {"pixel_values": {0: "batch"}}}),
    "bert": (
        BERT,
        {
            "dynamic": {"input_ids": TEXT, "attention_mask": TEXT},
            "ranges": {"input_ids": {"low": 0, "high": 30521}, "attention_mask": {"low": 0, "high": 1}},
        },
    ),
}


class _Silent:
    def say(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        pass


def plain(task: Any, config: dict[str, Any], path: Path) -> None:
    """What a script would do: build the module, export it, leave the file."""
    import torch

    module, example = task.call("model").eval(), task.call("example_inputs")
    shapes = config["dynamic"]
    torch.onnx.export(module, (), str(path), kwargs=example, dynamic_shapes=shapes, dynamo=True, verbose=False)


def one_run(who: str, name: str, folder: Path) -> dict[str, float]:
    import torch

    from layerline.pipeline.stage import Work
    from layerline.pipeline.task import Task
    from layerline.stages.export import Export
    from layerline.stages.fuse import Fuse
    from layerline.training.model import canonical_names
    from layerline.training.state import safetensors_io

    source, config = MODELS[name]
    (folder / "task.py").write_text(source)
    task = Task(folder / "task.py")
    torch.manual_seed(0)
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),), dynamo=True, verbose=False)
    if who == "plain":
        start = time.perf_counter()
        plain(task, config, folder / "plain.onnx")
        return {"export": time.perf_counter() - start}
    module = task.call("model")
    works = {k: Work(inputs={}, task=task, out=folder / k, scratch=folder, log=_Silent()) for k in ("onnx", "fused")}
    for folder_ in ("weights", "onnx", "fused"):
        (folder / folder_).mkdir()
    safetensors_io.save(folder / "weights" / "model.safetensors", canonical_names.named(module).tensors)
    seconds = {}
    for stage, key, inputs in (
        (Export(**config), "onnx", {"weights": folder / "weights"}),
        (Fuse(), "fused", {"model": folder / "onnx"}),
    ):
        start = time.perf_counter()
        report = stage.run(Work(**{**vars(works[key]), "inputs": inputs}))
        seconds[stage.name] = time.perf_counter() - start
        assert report.passed, report.first_failing()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(one_run(*options.one, Path(folder))))
        return
    result: dict[str, Any] = {"name": "export, parity and fuse beside plain torch.onnx.export", "unit": "s"}
    for name in MODELS:
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
        for _ in range(options.rounds):
            for who, kept in runs.items():
                out = subprocess.run(
                    [sys.executable, __file__, "--one", who, name], check=True, capture_output=True, text=True
                )
                kept.append(json.loads(out.stdout.splitlines()[-1]))
                print(name, who, kept[-1])
        median = {k: statistics.median(r[k] for r in runs["ours"]) for k in runs["ours"][0]}
        theirs = statistics.median(r["export"] for r in runs["plain"])
        result[name] = {k: round(v, 2) for k, v in median.items()} | {
            "plain": round(theirs, 2),
            "added_share": round((sum(median.values()) - theirs) / theirs, 3),
        }
    result["ours"] = round(sum(result[n]["export"] + result[n]["fuse"] for n in MODELS), 2)
    result["theirs"] = round(sum(result[n]["plain"] for n in MODELS), 2)
    result["ratio"] = round(result["ours"] / result["theirs"], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
