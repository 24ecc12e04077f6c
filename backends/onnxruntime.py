"""ONNX Runtime: the reference that every ONNX artifact is checked on."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerline.backends.base import Array, Feed, check_names, not_installed, switch_off_telemetry
from layerline.pipeline.errors import StageError

if TYPE_CHECKING:
    from layerline.backends.light import Model

_STATUS = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_PLACE = re.compile(r"/\S*onnxruntime_src/\S+:\d+ [^\n]*?\) (?=\S)")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
_FOLDER = "session.model_external_initializers_file_folder_path"
# CPU flags under which 8-bit dot products add in 32 bits. Without one, kernels that multiply u8 by s8 add pairs in
# int16, which saturates at 32,767.
_INT8_FLAGS = ("avx512_vnni", "avx_vnni", "i8mm", "asimddp")


class OnnxRuntime:
    """Runs a graph as it is written, on the CPU: a comparison must not see what a runtime makes of it.

    Args:
        threads: intra-op threads; 0 leaves the choice to the runtime.
        defaults: the runtime's own options instead, as its users have them: it rewrites the graph and re-uses memory.
        extended: with `defaults`, the optimisations up to ORT_ENABLE_EXTENDED, in place of ORT_ENABLE_ALL.
        config: further entries of the session's configuration, by key.
        few_runs: weights stay as they lie; laying them out anew for the kernels takes as long as it saves in some eight
            runs.
    """

    name = "onnxruntime"

    def __init__(
        self,
        *,
        threads: int = 0,
        few_runs: bool = False,
        defaults: bool = False,
        extended: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.threads = threads
        self.few_runs = few_runs
        self.defaults = defaults
        self.extended = extended
        self.config = config or {}

    def unavailable_reason(self) -> str | None:
        return not_installed("onnxruntime", "onnxruntime-gpu")

    def open(self, model: Path | bytes | Model, taps: Sequence[str] = ()) -> OrtSession:
        """Loads a file, its bytes, or a model in memory; the last may be larger than one message can be.

        Raises:
            StageError: onnxruntime refuses the model.
            ProcessDied: it would end this process; only looked at with `defaults`.
        """
        from layerline.backends import subprocess_build

        if self.defaults and _computes_in_half(model):
            # onnxruntime 1.31 crashes on some of these: a MatMul of float16 behind a Transpose of its first axis.
            name = "onnxruntime crashes on this model: its process"
            subprocess_build.call(_try, self, _portable(model), tuple(taps), process_name=name, where="model")
        return self._open(model, taps)

    def _open(self, model: Path | bytes | Model, taps: Sequence[str]) -> OrtSession:
        switch_off_telemetry()
        import onnxruntime as ort

        options = ort.SessionOptions()
        # Fatal messages only: errors come as exceptions.
        options.log_severity_level = 4
        options.intra_op_num_threads = self.threads
        if self.few_runs:
            # Prepacking copies every weight into the layout of its kernel.
            options.add_session_config_entry("session.disable_prepacking", "1")
        for key, value in self.config.items():
            options.add_session_config_entry(key, value)
        if not self.defaults:
            # Sizes and reductions are taken as soon as they can be, and what they read is let go.
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # Planning who reuses whose memory takes seconds where thousands of values are tapped, and saves none.
            options.enable_mem_reuse = False
        elif self.extended:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        weights: list[Any] = []
        if isinstance(model, bytes | Path):
            source = model if isinstance(model, bytes) else str(model)
        else:
            # Of a model in memory only the graph is serialised: a message takes 2 GiB at most.
            source, weights = _bytes(model, options, optimised=self.defaults)
        try:
            if taps:
                source = _with_taps(source, taps)
                if isinstance(model, Path):
                    # The tapped copy lives in memory; its external data stays where it is.
                    options.add_session_config_entry(_FOLDER, str(model.parent.resolve()))
            # Without its second try, which prints to standard output, finds the weights gone, and hides the reason.
            session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"], enable_fallback=0)
            return OrtSession(session, weights)
        except Exception as error:
            raise StageError(
                f"onnxruntime refuses the model: {plain(error)}", where=str(getattr(model, "name", "model"))
            ) from error


def _computes_in_half(model: Path | bytes | Model) -> bool:
    """Whether a model holds, takes or makes float16."""
    import onnx

    from layerline.backends import light

    proto = model
    if isinstance(model, Path):
        proto = onnx.load(str(model), load_external_data=False)
    elif isinstance(model, bytes):
        proto = onnx.load_from_string(model)
    graph = light.split(proto).model.graph
    types = {tensor.data_type for tensor in graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in graph.input}
    for node in light.all_nodes(graph.node):
        for attribute in node.attribute:
            if attribute.name == "to":
                types.add(attribute.i)
            elif attribute.HasField("t"):
                types.add(attribute.t.data_type)
    return onnx.TensorProto.FLOAT16 in types


def _portable(model: Path | bytes | Model) -> Path | bytes:
    """A model as another process takes it."""
    from layerline.backends import light

    if isinstance(model, Path):
        return model.resolve()
    if isinstance(model, bytes):
        return model
    data: bytes = light.split(model).whole().SerializeToString()
    return data


def _try(runtime: OnnxRuntime, model: Path | bytes, taps: Sequence[str]) -> None:
    """Opens a session in a process that may end by it."""
    runtime._open(model, taps)


def plain(error: Exception) -> str:
    """What onnxruntime says, without its status codes and the places in its own sources; the node's name stays."""
    text = _STATUS.sub("", _PLACE.sub("", str(error)))
    return _NODE.sub(r"\1 node \2: ", text).strip()


def int8_flag(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The CPU's flag for 8-bit dot products; "" where it has none, None where that is unknown."""
    if not cpuinfo.is_file():
        return None
    # All lines of the file: the flags of each core are words of their own.
    flags = set(cpuinfo.read_text("utf-8", errors="replace").split())
    for flag in _INT8_FLAGS:
        if flag in flags:
            return flag
    return ""


def int8_note(flag: str | None) -> str:
    """What the CPU's int8 arithmetic means for a comparison of Q/DQ models made on it."""
    cpu = f"this CPU has {flag}"
    if flag is None:
        cpu = f"the flags of this {platform.machine()} CPU are unknown"
    elif not flag:
        cpu = "this CPU has no VNNI"
    return (
        "onnxruntime computed Q/DQ in float32, so no int8 sum saturated in this comparison; weights and activations "
        f"are signed, and int8 kernels that pair u8 with s8 saturate on CPUs without VNNI ({cpu})"
    )


class OrtSession:
    """A loaded model on ONNX Runtime; it keeps `weights`, which it reads from memory that is not its own."""

    def __init__(self, session: Any, weights: Sequence[Any] = ()) -> None:
        self._session, self._weights = session, weights
        self.inputs = [i.name for i in session.get_inputs()]
        self.outputs = [o.name for o in session.get_outputs()]
        # Type as onnxruntime writes it ("tensor(float)") and shape, of every input, output and tap.
        self.types: dict[str, tuple[str, list[int | str | None]]] = {
            v.name: (v.type, v.shape) for v in (*session.get_inputs(), *session.get_outputs())
        }

    def run(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        try:
            return dict(zip(self.outputs, self._session.run(None, dict(feed)), strict=True))
        except Exception as error:
            raise StageError(f"onnxruntime could not run the model: {plain(error)}", where="run") from error


def _bytes(model: Model, options: Any, *, optimised: bool) -> tuple[bytes, list[Any]]:
    """A model's graph as a message, and its weights as the session reads them: where they lie, without a copy.

    Optimisations read weights before the session has them, so there the runtime copies them into the graph.
    """
    import onnxruntime as ort

    from layerline.backends import light

    # A weight that isn't in the message has to lie in a file, and behind no link, though nobody opens it: the session
    # is given every one of them. The runtime's own file is there however this package is installed.
    file = Path(ort.__file__).resolve()
    options.add_session_config_entry(_FOLDER, str(file.parent))
    parts = light.split(model)
    # The runtime takes no weights but those that are read. An input that the model stores as well counts as read:
    # without its weight it would have to be fed.
    read = {*light.reads(parts.model.graph), *(i.name for i in parts.model.graph.input)}
    weights = {name: weight for name, weight in parts.weights.items() if name in read}
    values: list[Any] = []  # which hold their arrays
    for name, weight in weights.items():
        # By the ONNX type: numpy has neither bfloat16 nor 8-bit floats.
        values.append(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(light.as_integers(weight), weight.dtype))
        if not optimised:
            options.add_initializer(name, values[-1])
    if optimised:
        options.add_external_initializers(list(weights), values)
    return parts.stand_ins(weights, file.name).SerializeToString(), values


def _with_taps(source: str | bytes, taps: Sequence[str]) -> bytes:
    import onnx

    if isinstance(source, bytes):
        model = onnx.load_from_string(source)
    else:
        model = onnx.load(source, load_external_data=False)
    values = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        values.update(node.output)
    # What is an output already must not be declared twice.
    values.difference_update(output.name for output in model.graph.output)
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(tap) for tap in taps if tap in values)
    data: bytes = model.SerializeToString()
    return data
