"""What the fusion benchmarks run on: real architectures with random weights, and files that ship in packages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

OPSET = 20


@dataclass(frozen=True)
class Model:
    """One benchmark model.

    Attributes:
        dims: sizes of its symbolic dimensions by name, or "input 0" where axis 0 of `input` has none; each in two
            variants, for the proof and for the clock.
        fixed: inputs that are not drawn at random.
    """

    name: str
    path: Path
    dims: Mapping[str, tuple[int, int]]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def feed(self, variant: int, seed: int = 0) -> dict[str, Any]:
        """Random inputs at the sizes of one variant."""
        model = onnx.load(str(self.path), load_external_data=False)
        stored, rng = {t.name for t in model.graph.initializer}, np.random.default_rng(seed)
        inputs = [i for i in model.graph.input if i.name not in stored]
        drawn = {i.name: _random(i, self._shape(i, variant), rng) for i in inputs}
        return drawn | {k: v for k, v in self.fixed.items() if k in drawn}

    def _shape(self, value: onnx.ValueInfoProto, variant: int) -> list[int]:
        sizes = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            named = self.dims.get(dim.dim_param) or self.dims.get(f"{value.name} {axis}", (2, 2))
            sizes.append(dim.dim_value if dim.dim_value > 0 else named[variant])
        return sizes


def models(folder: Path) -> Iterator[Model]:
    """Builds each model once into `folder` and yields it."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    for name, build in BUILDERS.items():
        path = folder / f"{name}.onnx"
        if not path.is_file():
            torch.manual_seed(0)
            module, inputs, shapes = build()
            export(module, inputs, shapes, path)
        yield Model(name, path, {"batch": (2, 1), "seq": (7, 64), "frames": (40, 40)})
    yield from shipped()


def export(module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], path: Path) -> None:
    """The exporter's plain graph: what its own optimiser would do is ours to do."""
    program = torch.onnx.export(
        module.eval(), inputs, dynamo=True, dynamic_shapes=shapes, opset_version=OPSET, optimize=False, verbose=False
    )
    program.save(str(path))


def shipped() -> Iterator[Model]:
    """ONNX files inside installed packages; packages that aren't installed are passed over."""
    for path in _inside("rapidocr_onnxruntime", "models"):
        height = 48 if "rec" in path.name else 96
        yield Model(path.stem, path, {"x 0": (2, 1), "x 2": (height, height), "x 3": (64, 160)} | _paddle(height))
    for path in _inside("silero_vad", "data"):
        sizes = {"batch": (2, 1), "sequence": (576, 576), "sequence_length": (3, 8)}
        sizes |= {"input 0": (2, 1), "input 1": (576, 576), "state 1": (2, 1)}
        yield Model(path.stem, path, sizes, {"sr": np.array(16000)})
    for path in _inside("swift_f0", ""):
        fixed = {"fmin": np.array(50, np.float32), "fmax": np.array(1000, np.float32)}
        yield Model(f"swift_f0_{path.stem}", path, {"samples": (4000, 16000)}, fixed)


def _paddle(height: int) -> dict[str, tuple[int, int]]:
    recognises = height == 48
    return {
        "p2o.DynamicDimension.0": (2, 1),
        "p2o.DynamicDimension.1": (64, 160) if recognises else (height, height),
        "p2o.DynamicDimension.2": (64, 160),
    }


def _inside(package: str, folder: str) -> list[Path]:
    spec = find_spec(package)
    return sorted((Path(str(spec.origin)).parent / folder).glob("*.onnx")) if spec else []


class _Pick(nn.Module):
    """Runs a transformers model on keyword arguments and gives one field of its output."""

    def __init__(self, net: nn.Module, names: tuple[str, ...], field: str) -> None:
        super().__init__()
        self.net, self.names, self.field = net, names, field

    def forward(self, *args: torch.Tensor) -> Any:
        return getattr(self.net(**dict(zip(self.names, args, strict=True))), self.field)


Built = tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]
BATCH, SEQ = "batch", "seq"


def _image(net: nn.Module, size: int) -> Built:
    return _Pick(net, ("pixel_values",), "logits"), (torch.randn(2, 3, size, size),), (({0: BATCH},),)


def resnet18() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    return _image(ResNetForImageClassification(config), 224)


def mobilenetv2() -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return _image(MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000)), 224)


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=6, hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    return _image(ViTForImageClassification(config), 224)


def _tokens(net: nn.Module, field: str) -> Built:
    ids = torch.randint(0, 100, (2, 7))
    each = {0: BATCH, 1: SEQ}
    return _Pick(net, ("input_ids", "attention_mask"), field), (ids, torch.ones_like(ids)), ((each, each),)


def bert() -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    return _tokens(BertForSequenceClassification(config), "logits")


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000, use_cache=False)
    return _tokens(GPT2LMHeadModel(config), "logits")


def whisper_encoder() -> Built:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    net = _Pick(WhisperEncoder(config), ("input_features",), "last_hidden_state")
    return net, (torch.randn(2, 80, 3000),), (({0: BATCH},),)


class UNet(nn.Module):
    """Two levels, BatchNorm everywhere, ConvTranspose on the way up."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            layers = [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers, nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

        self.a, self.b, self.c = block(3, 16), block(16, 32), block(32, 64)
        self.up1 = nn.Sequential(nn.ConvTranspose2d(64, 32, 2, stride=2, bias=False), nn.BatchNorm2d(32))
        self.up2 = nn.Sequential(nn.ConvTranspose2d(32, 16, 2, stride=2, bias=False), nn.BatchNorm2d(16))
        self.d, self.e, self.out = block(64, 32), block(32, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(nn.functional.max_pool2d(a, 2))
        c = self.c(nn.functional.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up1(c), b], 1))
        return self.out(self.e(torch.cat([self.up2(d), a], 1)))


def unet() -> Built:
    net = UNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return net, (torch.randn(2, 3, 64, 64),), ({0: BATCH},)


class Lstm(nn.Module):
    """Bidirectional, two layers, last state to a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(40, 64, 2, batch_first=True, bidirectional=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(x)
        return self.out(y[:, -1])


def lstm() -> Built:
    return Lstm(), (torch.randn(2, 7, 40),), ({0: BATCH, 1: SEQ},)


BUILDERS: dict[str, Callable[[], Built]] = {
    f.__name__: f for f in (resnet18, mobilenetv2, vit, bert, gpt2, whisper_encoder, unet, lstm)
}


def _random(value: onnx.ValueInfoProto, shape: list[int], rng: np.random.Generator) -> Any:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return (
        np.ones(shape, dtype)
        if "mask" in value.name or dtype.kind == "b"
        else rng.integers(0, 100, shape).astype(dtype)
    )
