"""Planted faults: does `pipe why` name the stage, the layer and the cause, and is it silent on sound projects?

Small networks are trained on the 8x8 digits of scikit-learn: one of convolutions with BatchNorm and one of linear
layers. Each kind of fault is planted twice, at places drawn by a seed, and as many sound projects with other settings
are examined. A fault that costs no accuracy counts as one that took no effect, and silence is right there.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

from layerline import cli
from layerline.graph.quantization import measured_plan
from layerline.training.state import checkpoint

NETS = ("convolutions", "linear")
TASK = '''
"""Digits of 8x8 pixels."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


def digits():
    table = load_digits()
    order = np.random.default_rng(0).permutation(len(table.target))
    return (table.images[order] / 16).astype(np.float32)[:, None], table.target[order].astype(np.int64)


def train_data():
    pixels, targets = digits()
    return pixels[:1200], targets[:1200]


def eval_data():
    pixels, targets = digits()
    return pixels[1200:], targets[1200:]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential()
        width = 1
        for to in (8, 16, 16, 32):
            self.body.extend([nn.Conv2d(width, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU()])
            width = to
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten())
        for width in (64, 64, 64):
            self.body.extend([nn.Linear(64, width), nn.ReLU()])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(x))


def model():
    return NETWORK()


def loss(net, batch):
    pixels, targets = batch
    return nn.functional.cross_entropy(net(pixels), targets)


def metric(outputs, targets):
    return {"accuracy": float((outputs.argmax(axis=1) == targets).mean())}
'''
BRIGHTNESS = """    bright = np.where(table.target[order] == DARK, 0.1, 1.0)[:, None, None]
    return (table.images[order] * bright / 16)"""
EXPORT = "export: {dynamic: {x: {0: batch}}}\n"
TRAINED = "train: {steps: 300, batch_size: 32, seed: SEED, TRAINING}\n" + EXPORT + "quantize: QUANTIZE\n"
IMPORTED = "import-weights: {file: weights.safetensors}\n" + EXPORT + "quantize: QUANTIZE\n"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A project with a fault.

    Attributes:
        path: its folder.
        stage: where accuracy is lost.
        causes: the names that are right.
        layers: the names that are right; empty where the fault has no layer.
        patch: what is changed while the project runs.
    """

    path: Path
    stage: str
    causes: tuple[str, ...]
    layers: Collection[str] = ()
    patch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Workshop:
    """Trains the networks once and makes copies of their projects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._copies = 0

    def base(self, net: str, seed: int) -> Path:
        """A project that ran up to fuse."""
        path = self.folder / f"{net}-{seed}"
        if not path.is_dir():
            path.mkdir()
            write(path, net, TRAINED, seed=seed)
            pipe("run", "fuse", path)
        return path

    def copy(self, net: str, seed: int) -> Path:
        self._copies += 1
        return Path(shutil.copytree(self.base(net, seed), self.folder / f"copy-{self._copies}"))

    def new(self, net: str, seed: int, training: str = "") -> Path:
        """A project that has not run."""
        self._copies += 1
        path = self.folder / f"new-{self._copies}"
        path.mkdir()
        write(path, net, TRAINED, seed=seed, training=training)
        return path

    def with_weights(
        self, net: str, seed: int, change: Callable[[dict[str, np.ndarray]], None], quantize: str = "{}"
    ) -> Path:
        """A project that imports the trained weights, changed."""
        base = self.base(net, seed)
        self._copies += 1
        path = self.folder / f"weights-{self._copies}"
        path.mkdir()
        _, text = pipe("path", "ema", base)
        weights = load_file(Path(text.strip().splitlines()[-1]) / "model.safetensors")
        change(weights)
        save_file(weights, path / "weights.safetensors")
        write(path, net, IMPORTED, quantize=quantize)
        return path


def write(path: Path, net: str, pipe_yaml: str, *, seed: int = 0, training: str = "", quantize: str = "{}") -> None:
    network = {"convolutions": "Convolutions", "linear": "Perceptron"}[net]
    text = pipe_yaml.replace("SEED", str(seed)).replace(", TRAINING", f", {training}" if training else "")
    (path / "pipe.yaml").write_text(text.replace("QUANTIZE", quantize))
    (path / "task.py").write_text(TASK.replace("NETWORK", network))


def pipe(command: str, *arguments: str | Path) -> tuple[int, str]:
    """Runs a command of pipe in this process; the last argument is the project's folder."""
    *others, folder = arguments
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = cli.app([command, *map(str, others), "-C", str(folder)], prog_name="pipe", standalone_mode=False)
    return code or 0, out.getvalue()


def edit_task(path: Path, old: str, new: str) -> None:
    text = (path / "task.py").read_text()
    assert old in text
    (path / "task.py").write_text(text.replace(old, new))


def append(path: Path, code: str) -> None:
    with (path / "task.py").open("a") as file:
        file.write(f"\n\n{code}")


def with_settings(path: Path, quantize: str) -> None:
    text = (path / "pipe.yaml").read_text()
    (path / "pipe.yaml").write_text(text.replace("quantize: {}", f"quantize: {quantize}"))


def pixels() -> np.ndarray:
    """All images, (1797, 1, 8, 8) in 0..1."""
    return (load_digits().images[:, None] / 16).astype(np.float32)


def network(seed: int) -> str:
    """Each seed has another network."""
    return NETS[seed % 2]


def range_everywhere(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """All ranges are cut at a low percentile."""
    path = shop.copy(network(seed), seed)
    with_settings(path, f"{{calibrator: percentile, percentile: {rng.integers(50, 75)}}}")
    return Planted(path=path, stage="quantize", causes=("clipped range",))


def one_range(shop: Workshop, seed: int, rng: np.random.Generator, factor: float, causes: tuple[str, ...]) -> Planted:
    """The scale of one activation is multiplied."""
    places: set[str] = set()
    tuned = measured_plan.tuned
    draw = rng.random()

    def faulty(*arguments: Any, **options: Any) -> Any:
        result = tuned(*arguments, **options)
        values = list(result.plan.values)
        activations = [index for index, value in enumerate(values) if value.role == "activation"]
        index = activations[int(draw * len(activations))]
        value = values[index]
        scales = tuple(scale * factor for scale in value.scales)
        values[index] = dataclasses.replace(value, scales=scales, amax=value.amax * factor)
        places.update([value.name, value.module])
        return dataclasses.replace(result, plan=dataclasses.replace(result.plan, values=tuple(values)))

    path = shop.copy(network(seed), seed)
    patch = partial(mock.patch.object, measured_plan, "tuned", faulty)
    return Planted(path=path, stage="quantize", causes=causes, layers=places, patch=patch)


def clipped_value(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    return one_range(shop, seed, rng, 1 / 10, ("clipped range",))


def coarse_scale(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    return one_range(shop, seed, rng, 60, ("range far beyond the data",))


def large_channel(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """A channel that is never active has weights 400 times as large, under one scale a tensor."""
    net = network(seed)
    layer = int(rng.integers(1, 3))
    channel = int(rng.integers(0, 8))

    def change(weights: dict[str, np.ndarray]) -> None:
        if net == "convolutions":
            weights[f"body.{3 * layer + 1}.weight"][channel] *= 400
            weights[f"body.{3 * layer + 1}.bias"][channel] = -20000
        else:
            weights[f"body.{2 * layer + 1}.weight"][channel] *= 400
            weights[f"body.{2 * layer + 1}.bias"][channel] = -20000

    path = shop.with_weights(net, seed, change, "{per_channel: false}")
    place = f"body.{3 * layer if net == 'convolutions' else 2 * layer + 1}"
    return Planted(path=path, stage="quantize", causes=("uneven weight channels",), layers={place})


def other_scale(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """Calibration data that was not divided by 255."""
    path = shop.copy(network(seed), seed)
    append(path, f"def calib_data():\n    return train_data()[0] * {rng.choice([127.5, 255])}\n")
    return Planted(path=path, stage="quantize", causes=("calibration data",))


def one_class(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """Calibration on the class with the darkest images alone, where brightness differs by class."""
    path = shop.new(network(seed), seed)
    edit_task(path, "    return (table.images[order] / 16)", BRIGHTNESS)
    with (path / "pipe.yaml").open("a") as file:
        file.write("ema: {weights: online}\n")
    only = rng.integers(0, 10)
    edit_task(path, "DARK", str(only))
    append(path, f"def calib_data():\n    x, y = train_data()\n    return x[y == {only}]\n")
    return Planted(path=path, stage="quantize", causes=("calibration data unlike eval_data()", "one class lost most"))


def overflow(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """A hidden value exceeds 65504 on bright images, which calibration has none of."""
    images = pixels()
    first = int(rng.integers(0, 2))
    layers = ["body.1", "body.3", "body.5", "head"]
    places = {layers[first]}

    def change(weights: dict[str, np.ndarray]) -> None:
        x = images.reshape(len(images), -1)
        for layer in layers[: first + 1]:
            x = np.maximum(x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"], 0)
        factor = np.float32(28000 / x.max())
        here, after, last = layers[first : first + 3]
        weights[f"{here}.weight"] *= factor
        weights[f"{here}.bias"] *= factor
        weights[f"{after}.weight"] /= factor**0.5
        weights[f"{after}.bias"] *= factor**0.5
        weights[f"{last}.weight"] /= factor**0.5

    path = shop.with_weights("linear", seed, change, "{mode: fp16}")
    edit_task(path, "return pixels[1200:], t", "pixels[1200::10] *= 3\n    return pixels[1200:], t")
    return Planted(path=path, stage="quantize", causes=("overflow of half precision",), layers=places)


def rare_nan(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """A square root of a number that is negative for a few images."""
    net = network(seed)
    path = shop.with_weights(net, seed, lambda _: None)
    sums = pixels().sum((1, 2, 3))
    limit = float(np.quantile(sums, rng.uniform(0.96, 0.98)))
    edit_task(path, "self.body(x)", f"self.body(x + 0 * torch.sqrt({limit} - x.sum((1, 2, 3), keepdim=True)))")
    return Planted(path=path, stage="import-weights", causes=("values that are not finite",))


def stale_statistics(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """The average has the statistics of one BatchNorm from the first step."""
    path = shop.new("convolutions", seed)
    name = f"body.{3 * int(rng.integers(0, 4)) + 1}"
    load = checkpoint.weights

    def faulty(*arguments: Any, **options: Any) -> Any:
        online, averaged = load(*arguments, **options)
        averaged = dict(averaged)
        averaged[f"{name}.running_mean"] = averaged[f"{name}.running_mean"] * 0
        averaged[f"{name}.running_var"] = averaged[f"{name}.running_var"] * 0 + 1
        return online, averaged

    patch = partial(mock.patch.object, checkpoint, "weights", faulty)
    return Planted(path=path, stage="ema", causes=("stale BatchNorm statistics",), layers={name}, patch=patch)


def lagging_average(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    path = shop.new(network(seed), seed, f"training: {{ema_decay: {rng.choice([0.9998, 0.9999])}, ema_warmup: false}}")
    return Planted(path=path, stage="ema", causes=("the average lags behind",))


def late_divergence(shop: Workshop, seed: int, rng: np.random.Generator) -> Planted:
    """The targets of the last fifth of the steps are wrong."""
    path = shop.new(network(seed), seed)
    edit_task(path, "def loss(net, batch):", "STEPS = [0]\n\ndef loss(net, batch):\n    STEPS[0] += 1")
    wrong = f"    if STEPS[0] > 240:\n        targets = (targets + {rng.integers(1, 10)}) % 10\n"
    edit_task(path, "    return nn.functional", f"{wrong}    return nn.functional")
    return Planted(path=path, stage="train", causes=("training got worse at the end",))


Kind = Callable[[Workshop, int, np.random.Generator], Planted]
KINDS: tuple[Kind, ...] = (
    range_everywhere,
    clipped_value,
    coarse_scale,
    large_channel,
    other_scale,
    one_class,
    overflow,
    rare_nan,
    stale_statistics,
    lagging_average,
    late_divergence,
)
SOUND = ("{}", "{calibrator: minmax}", "{calibrator: entropy}", "{per_channel: false}", "{mode: fp16}")


def why(path: Path) -> dict[str, Any]:
    code, text = pipe("why", "--json", path)
    if code:
        return {"error": text}
    report: dict[str, Any] = json.loads(text)["report"]
    return report


def losses(report: dict[str, Any]) -> list[str]:
    """The stages that the verdict names."""
    return [note.split(":")[0].removeprefix("lost in ") for note in report["notes"] if note.startswith("lost in ")]


def examine(shop: Workshop, kind: Kind, seed: int) -> dict[str, Any]:
    planted = kind(shop, seed, np.random.default_rng(seed))
    with planted.patch():
        code, _ = pipe("run", "quantize", planted.path)
    report = why(planted.path)
    result: dict[str, Any] = {"fault": kind.__name__, "seed": seed, "run": code}
    if "error" in report:
        return {**result, "error": report["error"]}
    causes = report["tables"]["causes"]
    if not losses(report) and not causes:
        scores = {row["stage"]: row["value"] for row in report["tables"]["metric by stage"]}
        return {**result, "silent": True, "scores": scores}
    first = causes[0] if causes else {"stage": "", "cause": "", "layer": ""}
    stage = losses(report)[0] if losses(report) else first["stage"]
    result |= {"stage": stage == planted.stage, "cause": first["cause"] in planted.causes}
    if planted.layers:
        # A value's name, or its module's in the evidence.
        words = first.get("evidence", "").replace(",", "").replace(";", "").split()
        result["layer"] = any(place in (first["layer"], *words) for place in planted.layers)
    if not all(result[key] for key in ("stage", "cause", "layer") if key in result):
        result["said"] = [stage, first["cause"], first["layer"], first.get("evidence", "")]
        result["planted"] = sorted(planted.layers)
        result["others"] = [(row["cause"], row["layer"]) for row in causes[1:6]]
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--only", help="the name of one kind of fault")
    options.add_argument("--details", action="store_true", help="print each project")
    chosen = options.parse_args()
    started = time.perf_counter()
    kinds = [kind for kind in KINDS if chosen.only in (None, kind.__name__)]
    results: list[dict[str, Any]] = []
    silent: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        for kind in kinds:
            for seed in range(chosen.seeds):
                results.append(examine(shop, kind, seed))
                if chosen.details:
                    print(results[-1], file=sys.stderr)
        for number in range(0 if chosen.only else len(results)):
            seed = number % chosen.seeds
            net = NETS[number // chosen.seeds % 2]
            path = shop.copy(net, seed)
            with_settings(path, SOUND[number // (2 * chosen.seeds) % len(SOUND)])
            pipe("run", "quantize", path)
            report = why(path)
            silent.append("error" not in report and not losses(report) and not report["tables"]["causes"])
            if chosen.details and not silent[-1]:
                print(net, seed, (path / "pipe.yaml").read_text(), report, file=sys.stderr)
    took_effect = [result for result in results if not result.get("silent")]
    line: dict[str, Any] = {"benchmark": "faults", "planted": len(results), "took_effect": len(took_effect)}
    for key in ("stage", "layer", "cause"):
        judged = [result for result in took_effect if key in result or "error" in result]
        line[f"right_{key}"] = f"{sum(bool(result.get(key)) for result in judged)} of {len(judged)}"
    line["sound_silent"] = f"{sum(silent)} of {len(silent)}"
    line["missed"] = sorted({f"{r['fault']} {r['seed']}" for r in took_effect if "said" in r or "error" in r})
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
