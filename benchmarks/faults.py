"""Planted faults: does `pipe why` name the stage, the layer and the cause, and is it silent on sound projects?

Small networks are trained on the 8x8 digits of scikit-learn: one of convolutions with BatchNorm, one of linear layers,
and small versions of EfficientNet, ViT and BERT (which reads the pixels as tokens). Each kind of fault is planted once
for each seed, in a network and at a place that the seed chooses, and sound projects with other settings are examined. A
fault that costs no accuracy counts as one that took no effect, and silence is right there.
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

from layerline import cli
from layerline.export import torch_export
from layerline.graph.fusion import fuse
from layerline.graph.io import module_identity
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.quantization import measured_plan, qdq
from layerline.training.state import checkpoint

NETS = {
    "convolutions": "Convolutions",
    "linear": "Perceptron",
    "efficientnet": "Efficient",
    "vit": "Vision",
    "bert": "Tokens",
}
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


class Efficient(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.blocks = nn.Sequential(Inverted(16, 16, 1), Inverted(16, 24, 2), Inverted(24, 24, 1))
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Inverted(nn.Module):
    def __init__(self, width, to, stride):
        super().__init__()
        inner = 4 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        deep = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.depthwise = nn.Sequential(deep, nn.BatchNorm2d(inner), nn.SiLU())
        self.squeeze = nn.Sequential(nn.Conv2d(inner, 8, 1), nn.SiLU(), nn.Conv2d(8, inner, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, to, 1, bias=False), nn.BatchNorm2d(to))
        self.adds = stride == 1 and width == to

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + y if self.adds else y


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 2, 2)
        self.place = nn.Parameter(0.02 * torch.randn(16, 32))
        self.blocks = nn.Sequential(Block(32, 2), Block(32, 2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(17, 32)
        self.place = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.blocks = nn.Sequential(Block(32, 2), Block(32, 2))
        self.pooler = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.norm(self.words(x) + self.place.weight)
        return self.head(torch.tanh(self.pooler(self.blocks(x).mean(1))))


def model():
    return NETWORK()


def loss(net, batch):
    pixels, targets = batch
    return nn.functional.cross_entropy(net(pixels), targets)


def metric(outputs, targets):
    return {"accuracy": float((outputs.argmax(axis=1) == targets).mean())}
'''
TOKENS = "table.images[order].astype(np.int64).reshape(-1, 64)"
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


class Projects:
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
    text = pipe_yaml.replace("SEED", str(seed)).replace(", TRAINING", f", {training}" if training else "")
    if net in ("vit", "bert"):  # which learn more slowly
        text = text.replace("steps: 300", "steps: 600, optimizer: {name: adamw, lr: 0.003}")
    (path / "pipe.yaml").write_text(text.replace("QUANTIZE", quantize))
    task = TASK.replace("NETWORK", NETS[net])
    if net == "bert":
        task = task.replace("(table.images[order] / 16).astype(np.float32)[:, None]", TOKENS)
    (path / "task.py").write_text(task)


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


def network(seed: int, of: Sequence[str] = ("convolutions", "linear", "efficientnet", "vit")) -> str:
    """Each seed has another network of those in which the fault can be planted."""
    return of[seed % len(of)]


def range_everywhere(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """All ranges are cut at a low percentile."""
    path = projects.copy(network(seed, tuple(NETS)), seed)
    with_settings(path, f"{{calibrator: percentile, percentile: {rng.integers(50, 75)}}}")
    return Planted(path=path, stage="quantize", causes=("clipped range",))


def one_range(
    projects: Projects, seed: int, rng: np.random.Generator, factor: float, causes: tuple[str, ...]
) -> Planted:
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

    path = projects.copy(network(seed, tuple(NETS)), seed)
    patch = partial(mock.patch.object, measured_plan, "tuned", faulty)
    return Planted(path=path, stage="quantize", causes=causes, layers=places, patch=patch)


def clipped_value(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    return one_range(projects, seed, rng, 1 / 10, ("clipped range",))


def coarse_scale(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    return one_range(projects, seed, rng, 60, ("range far beyond the data",))


def large_channel(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """A channel that is never active has weights 400 times as large, under one scale a tensor."""
    net = network(seed, ("convolutions", "linear"))
    layer = int(rng.integers(1, 3))
    channel = int(rng.integers(0, 8))

    def change(weights: dict[str, np.ndarray]) -> None:
        if net == "convolutions":
            weights[f"body.{3 * layer + 1}.weight"][channel] *= 400
            weights[f"body.{3 * layer + 1}.bias"][channel] = -20000
        else:
            weights[f"body.{2 * layer + 1}.weight"][channel] *= 400
            weights[f"body.{2 * layer + 1}.bias"][channel] = -20000

    path = projects.with_weights(net, seed, change, "{per_channel: false}")
    place = f"body.{3 * layer if net == 'convolutions' else 2 * layer + 1}"
    return Planted(path=path, stage="quantize", causes=("uneven weight channels",), layers={place})


def other_scale(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """Calibration data that was not divided by 255."""
    path = projects.copy(network(seed), seed)
    append(path, f"def calib_data():\n    return train_data()[0] * {rng.choice([127.5, 255])}\n")
    return Planted(path=path, stage="quantize", causes=("calibration data",))


def one_class(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """Calibration on the class with the darkest images alone, where brightness differs by class."""
    path = projects.new(network(seed), seed)
    edit_task(path, "    return (table.images[order] / 16)", BRIGHTNESS)
    with (path / "pipe.yaml").open("a") as file:
        file.write("ema: {weights: online}\n")
    only = rng.integers(0, 10)
    edit_task(path, "DARK", str(only))
    append(path, f"def calib_data():\n    x, y = train_data()\n    return x[y == {only}]\n")
    return Planted(path=path, stage="quantize", causes=("calibration data unlike eval_data()", "one class lost most"))


def overflow(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
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

    path = projects.with_weights("linear", seed, change, "{mode: fp16}")
    edit_task(path, "return pixels[1200:], t", "pixels[1200::10] *= 3\n    return pixels[1200:], t")
    return Planted(path=path, stage="quantize", causes=("overflow of half precision",), layers=places)


def rare_nan(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """A square root of a number that is negative for a few images."""
    net = network(seed)
    path = projects.with_weights(net, seed, lambda _: None)
    body = {"efficientnet": "self.stem(x)", "vit": "self.patch(x)"}.get(net, "self.body(x)")
    sums = pixels().sum((1, 2, 3))
    limit = float(np.quantile(sums, rng.uniform(0.96, 0.98)))
    root = f"torch.sqrt({limit} - x.sum((1, 2, 3), keepdim=True))"
    edit_task(path, body, body.replace("(x)", f"(x + 0 * {root})"))
    return Planted(path=path, stage="import-weights", causes=("values that are not finite",))


def stale_statistics(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """The average has the statistics of one BatchNorm from the first step."""
    path = projects.new("convolutions", seed)
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


def lagging_average(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    training = f"training: {{ema_decay: {rng.choice([0.9998, 0.9999])}, ema_warmup: false}}"
    path = projects.new(network(seed), seed, training)
    return Planted(path=path, stage="ema", causes=("the average lags behind",))


def late_divergence(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """The targets of the last fifth of the steps are wrong."""
    path = projects.new(network(seed), seed)
    edit_task(path, "def loss(net, batch):", "STEPS = [0]\n\ndef loss(net, batch):\n    STEPS[0] += 1")
    wrong = f"    if STEPS[0] > 240:\n        targets = (targets + {rng.integers(1, 10)}) % 10\n"
    edit_task(path, "    return nn.functional", f"{wrong}    return nn.functional")
    return Planted(path=path, stage="train", causes=("training got worse at the end",))


def stale_layer(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """The average has the weights of one layer from the first step."""
    path = projects.new(network(seed, tuple(NETS)), seed)
    draw = rng.random()
    load = checkpoint.weights
    places: set[str] = set()

    def faulty(*arguments: Any, **options: Any) -> Any:
        online, averaged = load(*arguments, **options)
        names = [name for name, weight in averaged.items() if name.endswith(".weight") and weight.ndim > 1]
        name = names[int(draw * len(names))]
        shape = tuple(averaged[name].shape)
        noise = np.random.default_rng(seed).uniform(-1, 1, shape) / np.sqrt(np.prod(shape[1:]))
        places.update([name, name.removesuffix(".weight")])
        return online, {**averaged, name: averaged[name] * 0 + type(averaged[name])(noise.astype(np.float32))}

    patch = partial(mock.patch.object, checkpoint, "weights", faulty)
    causes = ("the average lags behind", "a weight of the average is far from the online one")
    return Planted(path=path, stage="ema", causes=causes, layers=places, patch=patch)


def noise_calibration(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """Calibration data is noise of the images' size."""
    path = projects.copy(network(seed), seed)
    scale = rng.choice([0.02, 0.1])
    noise = f"np.abs({scale} * np.random.default_rng(0).standard_normal((200, 1, 8, 8))).astype(np.float32)"
    append(path, f"def calib_data():\n    return {noise}\n")
    causes = ("calibration data unlike eval_data()", "calibration data", "clipped range")
    return Planted(path=path, stage="quantize", causes=causes)


Edit = Callable[[onnx.ModelProto, onnx.NodeProto], None]
WEIGHTED = ("Conv", "Gemm", "MatMul")


def weight_of(model: onnx.ModelProto, node: onnx.NodeProto, place: int = 1) -> onnx.TensorProto | None:
    """The stored tensor that a node reads, or that a Transpose or DequantizeLinear before it reads."""
    if place >= len(node.input):
        return None
    name = node.input[place]
    for other in model.graph.node:
        if name in other.output and other.op_type in ("Transpose", "DequantizeLinear"):
            name = other.input[0]
    return next((tensor for tensor in model.graph.initializer if tensor.name == name), None)


def changed(tensor: onnx.TensorProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    array = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def in_graph(
    projects: Projects,
    seed: int,
    rng: np.random.Generator,
    stage: str,
    edit: Edit,
    fits: Callable[[onnx.ModelProto, onnx.NodeProto], bool],
    causes: tuple[str, ...],
    nets: Sequence[str] = tuple(NETS),
    settings: str = "{}",
) -> Planted:
    """The ONNX model that a stage makes is edited at one node."""
    module, function = {"export": (torch_export, "trace"), "fuse": (fuse, "fuse"), "quantize": (qdq, "apply")}[stage]
    original = getattr(module, function)
    draw = rng.random()
    places: set[str] = set()

    def faulty(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        whole = ir.to_proto(result if stage == "quantize" else result.model)
        nodes = [node for node in whole.graph.node if fits(whole, node)]
        if not nodes:  # a trial with weights alone
            return result
        node = nodes[int(draw * len(nodes))]
        modules = module_identity.modules(whole)
        for name in layers_at(whole, node):
            places.update([name, *modules.get(name, name).split(", ")])
        edit(whole, node)
        edited = as_ir(whole)
        return edited if stage == "quantize" else dataclasses.replace(result, model=edited)

    path = projects.copy(network(seed, nets), seed)
    if stage != "quantize":
        # The copy has results of the stage before the fault.
        with (path / "pipe.yaml").open("a") as file:
            file.write("fuse: {proof_feeds: 1}\n")
        if stage == "export":
            edit_yaml = (path / "pipe.yaml").read_text().replace("export: {", "export: {probes: 5, ")
            (path / "pipe.yaml").write_text(edit_yaml)
    with_settings(path, settings)
    patch = partial(mock.patch.object, module, function, faulty)
    return Planted(path=path, stage=stage, causes=causes, layers=places, patch=patch)


def layers_at(model: onnx.ModelProto, node: onnx.NodeProto) -> list[str]:
    """The output of a node, and of the layers that read it where it is a Q or DQ."""
    names = list(node.output)
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        names.append(node.input[0])
        for reader in model.graph.node:
            if node.output[0] in reader.input:
                names += layers_at(model, reader)
    return names


def has_weight(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    return node.op_type in WEIGHTED and weight_of(model, node) is not None


def has_bias(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    return node.op_type in ("Conv", "Gemm") and weight_of(model, node, 2) is not None


def is_square(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    tensor = weight_of(model, node) if node.op_type in WEIGHTED else None
    return tensor is not None and len(tensor.dims) == 2 and tensor.dims[0] == tensor.dims[1]


def attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    for old in [item for item in node.attribute if item.name == name]:
        node.attribute.remove(old)
    node.attribute.append(helper.make_attribute(name, value))


PARITY = ("a value differs from the stage before",)


def wrong_epsilon(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    epsilon = float(rng.choice([0.1, 0.5]))

    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        attribute(node, "epsilon", epsilon)

    def fits(_: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        return node.op_type in ("BatchNormalization", "LayerNormalization")

    nets = ("convolutions", "efficientnet", "vit", "bert")
    return in_graph(projects, seed, rng, "export", edit, fits, PARITY, nets)


def swapped_channels(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        changed(weight_of(model, node), lambda array: np.roll(array, 1, 0))

    return in_graph(projects, seed, rng, "export", edit, has_weight, PARITY)


def transposed_weight(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        changed(weight_of(model, node), np.transpose)

    return in_graph(projects, seed, rng, "export", edit, is_square, PARITY, ("linear", "vit", "bert"))


def dropped_bias(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        changed(weight_of(model, node, 2), np.zeros_like)

    return in_graph(projects, seed, rng, "export", edit, has_bias, PARITY, ("linear", "efficientnet", "vit"))


def wrong_padding(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    def edit(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        attribute(node, "pads", [2, 2, 0, 0])

    def fits(_: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        pads = [list(item.ints) for item in node.attribute if item.name == "pads"]
        return node.op_type == "Conv" and pads == [[1, 1, 1, 1]]

    return in_graph(projects, seed, rng, "export", edit, fits, PARITY, ("convolutions", "efficientnet"))


def baked_axis(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """A reshape to the batch size of the example."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        shape = numpy_helper.from_array(np.int64([2, 10]), "baked/shape")
        model.graph.initializer.extend([shape, numpy_helper.from_array(np.int64([-1, 10]), "baked/back")])
        inner = node.output[0] + "/whole"
        node.output[0], name = inner, node.output[0]
        model.graph.node.append(helper.make_node("Reshape", [inner, "baked/shape"], ["baked"], "baked/a"))
        model.graph.node.append(helper.make_node("Reshape", ["baked", "baked/back"], [name], "baked/b"))

    def fits(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        return node.output[0] == model.graph.output[0].name

    planted = in_graph(projects, seed, rng, "export", edit, fits, (*PARITY, "module itself"))
    return dataclasses.replace(planted, layers=())


def folded_constant(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """fuse folds a factor into some channels of a weight that is a few per cent too large."""
    factor = np.float32(rng.uniform(1.02, 1.3))

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        def change(array: np.ndarray) -> np.ndarray:
            array[: max(1, len(array) // 4)] *= factor
            return array

        changed(weight_of(model, node), change)

    return in_graph(projects, seed, rng, "fuse", edit, has_weight, PARITY)


def folded_bias(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """fuse loses a bias."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        changed(weight_of(model, node, 2), np.zeros_like)

    return in_graph(projects, seed, rng, "fuse", edit, has_bias, PARITY)


ARITHMETIC = ("the model computes otherwise than its plan",)


def wrong_zero_point(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """Q and DQ of one value have zero points that differ."""
    number = rng.choice([-40, 40])

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int8), "wrong/zero"))
        node.input[2] = "wrong/zero"

    def fits(_: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        return node.op_type == "QuantizeLinear"

    return in_graph(projects, seed, rng, "quantize", edit, fits, ARITHMETIC)


def scales_out_of_place(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """The scales of a weight's channels are in another order."""
    order = np.random.default_rng(seed)

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        name = node.input[1]
        scales = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        changed(scales, lambda array: array[order.permutation(len(array))])

    def fits(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        scales = [t for t in model.graph.initializer if t.name == node.input[1]] if len(node.input) > 1 else []
        return node.op_type == "DequantizeLinear" and bool(scales) and len(scales[0].dims) == 1

    return in_graph(projects, seed, rng, "quantize", edit, fits, ARITHMETIC)


def quantized_bias_lost(projects: Projects, seed: int, rng: np.random.Generator) -> Planted:
    """quantize loses the bias of a layer."""

    def edit(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
        changed(weight_of(model, node, 2), np.zeros_like)

    return in_graph(projects, seed, rng, "quantize", edit, has_bias, ARITHMETIC)


Kind = Callable[[Projects, int, np.random.Generator], Planted]
KINDS: tuple[Kind, ...] = (
    range_everywhere,
    clipped_value,
    coarse_scale,
    large_channel,
    other_scale,
    noise_calibration,
    one_class,
    overflow,
    wrong_zero_point,
    scales_out_of_place,
    quantized_bias_lost,
    rare_nan,
    stale_statistics,
    stale_layer,
    lagging_average,
    late_divergence,
    wrong_epsilon,
    swapped_channels,
    transposed_weight,
    dropped_bias,
    wrong_padding,
    baked_axis,
    folded_constant,
    folded_bias,
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


def examine(projects: Projects, kind: Kind, seed: int) -> dict[str, Any]:
    planted = kind(projects, seed, np.random.default_rng(seed))
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
    first = causes[0] if causes else {"stage": "", "cause": "", "layer": "", "value": ""}
    stage = losses(report)[0] if losses(report) else first["stage"]
    result |= {"stage": stage == planted.stage, "cause": first["cause"] in planted.causes}
    if planted.layers:
        named = {first["value"], *first["layer"].split(", ")}
        result["layer"] = not named.isdisjoint(planted.layers)
    if not all(result[key] for key in ("stage", "cause", "layer") if key in result):
        result["said"] = [stage, first["cause"], first["layer"], first["value"], first.get("evidence", "")]
        result["planted"] = sorted(planted.layers)
        result["others"] = [(row["cause"], row["layer"]) for row in causes[1:6]]
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--sound", type=int, default=24, help="sound projects")
    options.add_argument("--only", help="names of kinds of faults, with commas")
    options.add_argument("--details", action="store_true", help="print each project")
    chosen = options.parse_args()
    started = time.perf_counter()
    kinds = [kind for kind in KINDS if not chosen.only or kind.__name__ in chosen.only.split(",")]
    results: list[dict[str, Any]] = []
    silent: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        projects = Projects(Path(folder))
        for seed in range(chosen.first, chosen.first + chosen.seeds):
            for kind in kinds:
                results.append(examine(projects, kind, seed))
                if chosen.details:
                    print(results[-1], file=sys.stderr, flush=True)
        for number in range(0 if chosen.only else chosen.sound):
            seed = chosen.first + number % chosen.seeds
            net = list(NETS)[number % len(NETS)]
            path = projects.copy(net, seed)
            with_settings(path, SOUND[number // len(NETS) % len(SOUND)])
            pipe("run", "quantize", path)
            report = why(path)
            silent.append("error" not in report and not losses(report) and not report["tables"]["causes"])
            if chosen.details and not silent[-1]:
                print(net, seed, (path / "pipe.yaml").read_text(), report, file=sys.stderr, flush=True)
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
