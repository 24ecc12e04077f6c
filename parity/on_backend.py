"""Compares a stage's ONNX model on a backend with ONNX Runtime: every value on the probes, and the task's metric."""

from __future__ import annotations

from collections.abc import Mapping

from layerline import backends
from layerline.backends.base import Backend, Session
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.tensorrt.builder import TensorRT
from layerline.backends.tensorrt.profiles import resolve
from layerline.compare.backend_compare import BackendSession, compare_on
from layerline.export import probe_files
from layerline.export.signature import Signature
from layerline.graph.io import onnx_files
from layerline.graph.quantization import convert
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.parity import evaluate
from layerline.pipeline.errors import StageError
from layerline.pipeline.inputs.metric import scores
from layerline.pipeline.report import Report, Scalar
from layerline.pipeline.stage import Work

_EMULATED = "onnxruntime lacks a type of this model, and reports run its emulation: name a backend that has the type"


def compare(stage: str, name: str, work: Work) -> Report:
    """Runs the model in `work.inputs["model"]` on the backend called `name`, and as it is written on ONNX Runtime.

    Raises:
        ConfigError: no such backend.
        Unavailable: it can't run on this machine.
        StageError: it refuses the model.
    """
    folder = work.inputs["model"]
    path = folder / onnx_files.FILE
    signature = Signature.load(folder)
    backend = _backend(name, signature)
    work.log.say(f"opening {stage}'s model with {name}")
    stored = onnx_files.read_model(path)
    runnable = convert.runnable(stored)
    try:
        session = BackendSession(backend, path)
    except StageError as error:
        if isinstance(backend, OnnxRuntime) and runnable is not stored:
            raise StageError(error.what, where=error.where, hint=_EMULATED) from error
        raise
    records, notes = compare_on(backend, path, session, probe_files.load(folder))
    data = CalibrationData(work, signature.inputs, batch_size=evaluate.BATCH)
    sessions: dict[str, Session] = {"reference": OnnxRuntime().open(runnable), "candidate": session}
    by_session, why = _scores(sessions, data)
    metrics: dict[str, Scalar] = {}
    if why:
        notes.append(f"no metric was measured: {why}")
    for metric, figure in by_session.get("candidate", {}).items():
        metrics[metric] = figure
        metrics[f"{metric}_reference"] = by_session["reference"][metric]
    candidate = f"onnx on {name}"
    if isinstance(backend, OnnxRuntime):
        candidate += ", default session"
    return Report(
        stage=stage,
        reference="onnx on onnxruntime (as written)",
        candidate=candidate,
        records=records,
        metrics=metrics,
        notes=tuple(notes),
    )


def _backend(name: str, signature: Signature) -> Backend:
    backend = backends.get(name)
    if isinstance(backend, TensorRT):
        # One profile over all sizes that the model takes.
        backend.profiles = resolve({v.name: v.shape for v in signature.inputs}, signature.dims, [], "signature.json")
    if isinstance(backend, OnnxRuntime):
        # The reference is ONNX Runtime without optimisations; this is the session that its users get.
        return OnnxRuntime(defaults=True)
    return backend


def _scores(sessions: Mapping[str, Session], data: CalibrationData) -> tuple[dict[str, dict[str, float]], str]:
    """The task's metrics on eval_data() by name of the session, or the reason why there are none."""
    samples = data.evaluation()
    if samples is None:
        return {}, "the task has no eval_data()"
    predictions = evaluate.predict(sessions, samples)
    if predictions.targets is None:
        return {}, "eval_data() gives no targets"
    return scores(evaluate.own_metric(data.task), predictions.outputs, predictions.targets)
