"""TensorRT and TensorRT-RTX: two modules with one API, served by one backend.

TensorRT times kernels while it builds and needs a device for that. TensorRT-RTX builds ahead of time on any machine,
the same bytes for the same model, and compiles for the device when the engine is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layerline.backends import subprocess_build
from layerline.backends.tensorrt import cuda
from layerline.backends.tensorrt.engine_session import EngineSession
from layerline.backends.tensorrt.network import Layer, Tensor, describe, tensor
from layerline.backends.tensorrt.profiles import Profile
from layerline.backends.tensorrt.trt_errors import (
    Messages,
    build_failed,
    inconsistent,
    parse_failed,
    reasons,
    summarise,
)
from layerline.pipeline.errors import ConfigError, StageError, Unavailable

# Distribution and backend name to the module it installs.
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_MEMORY = {
    "weights_bytes": "Total Weights Memory",
    "activations_bytes": "Total Activation Memory",
    "scratch_bytes": "Max Scratch Memory",
}


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished build: the engine, TensorRT's version, and the network as parsed (-1 stands for a dynamic size).

    Attributes:
        targets: compute capabilities it was built for; empty where the runtime's own choice was left.
        memory: bytes that the builder says it needs, by purpose.
        warnings: what the builder warned of, with how often.
        repeatable: whether address randomisation could be kept out of the bytes.
    """

    plan: bytes
    version: str
    layers: tuple[Layer, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    targets: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    warnings: Mapping[str, int] = field(default_factory=dict)
    repeatable: bool = True


@dataclass
class TensorRT:
    """Builds engines from ONNX files and runs them.

    Networks are strongly typed: float16 and int8 are computed where the model says so and nowhere else. No timing cache
    is loaded or kept: one of another version or device would be an error.

    Attributes:
        profiles: shapes of the dynamic inputs; an engine needs at least one where there are any.
        workspace_mb: greatest scratch memory a layer may use, in MiB; None leaves the device's.
        targets: compute capabilities to build for ("8.6"), TensorRT-RTX only; none leaves its own choice.
    """

    name: str = "tensorrt-rtx"
    _: KW_ONLY
    profiles: Sequence[Profile] = ()
    workspace_mb: int | None = None
    targets: Sequence[str] = ()

    def build_reason(self) -> str | None:
        """Why this machine can't build, in one sentence; None when it can."""
        if find_spec(MODULES[self.name]) is None:
            return f"{self.name} is not installed (pip install {self.name})"
        if self.name == "tensorrt":
            reason = cuda.unavailable_reason()
            if reason:
                return f"tensorrt needs a device to build, and {reason}"
        return None

    def unavailable_reason(self) -> str | None:
        return self.build_reason() or cuda.unavailable_reason()

    def build(self, model: Path, *, taps: Sequence[str] = (), modules: Mapping[str, str] | None = None) -> Built:
        """Builds an engine from an ONNX file.

        Args:
            model: the file, its external data beside it.
            taps: inner values that become outputs too.
            modules: module path by node name, to name in errors.

        Raises:
            Unavailable: this machine can't build.
            StageError: the parser or the builder refuses; names the node and module where TensorRT names the node.
        """
        reason = self.build_reason()
        if reason:
            raise Unavailable(reason)
        built: Built = subprocess_build.call(self._build, model.resolve(), taps, modules or {})
        return built

    def _build(self, model: Path, taps: Sequence[str], modules: Mapping[str, str]) -> Built:
        trt = _module(self.name)
        # The parser gets the bare file name. A longer path would shift later addresses, and so change the plan's bytes.
        os.chdir(model.parent)
        messages = _messages(trt)
        messages.clear()
        builder = trt.Builder(messages.logger)
        # Strongly typed: the builder may not choose another precision than the model says.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, messages.logger)
        if not parser.parse_from_file(model.name):
            raise parse_failed([parser.get_error(i) for i in range(parser.num_errors)], modules, Path(model.name))
        _refuse_shape_inputs(network)
        _prepare(trt, network, taps)
        # Before the build: as the file declares it, not as the builder fuses it.
        layers = describe(network)
        inputs = tuple(tensor(network.get_input(i)) for i in range(network.num_inputs))
        outputs = tuple(tensor(network.get_output(i)) for i in range(network.num_outputs))
        plan = builder.build_serialized_network(network, self._config(trt, builder))
        if plan is None:
            raise build_failed(messages, layers, modules)
        # The builder warns of such a profile, and leaves an engine that fails at run time.
        error = inconsistent(messages, layers, modules)
        if error is not None:
            raise error
        return Built(
            plan=bytes(plan),
            version=trt.__version__,
            layers=layers,
            inputs=inputs,
            outputs=outputs,
            targets=tuple(self.targets),
            memory=_memory(messages),
            warnings=summarise(messages),
            repeatable=subprocess_build.repeatable(),
        )

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> EngineSession:
        """Loads an engine (a file or its bytes), or builds an ONNX file and loads the result. Not run on a device yet.

        Only an ONNX file takes taps: the outputs of an engine are fixed when it is built.
        """
        reason = self.unavailable_reason()
        if reason:
            raise Unavailable(reason, where=f"backend {self.name}")
        if isinstance(model, Path) and model.suffix == ".onnx":
            plan = self.build(model, taps=taps).plan
        elif taps:
            raise StageError(f"an engine can't give inner values ({taps[0]}, …); open the ONNX file", where="taps")
        else:
            # Anything else is an engine that was built before.
            plan = model if isinstance(model, bytes) else model.read_bytes()
        trt = _module(self.name)
        messages = _messages(trt)
        messages.clear()
        # The runtime uses the CUDA context that is current.
        with cuda.Device() as device:
            runtime = trt.Runtime(messages.logger)
            engine = runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise StageError(f"TensorRT does not load the engine: {reasons(messages)}", where="engine")
            return EngineSession(engine, device, keep=runtime)

    def _config(self, trt: Any, builder: Any) -> Any:
        config = builder.create_builder_config()
        if self.workspace_mb is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace_mb << 20)
        if self.targets:
            _set_targets(trt, config, self.targets)
        for profile in self.profiles:
            shapes = builder.create_optimization_profile()
            for name, limits in profile.items():
                shapes.set_shape(name, limits.min, limits.opt, limits.max)
            config.add_optimization_profile(shapes)
        return config


tensorrt = partial(TensorRT, "tensorrt")
tensorrt_rtx = partial(TensorRT, "tensorrt-rtx")


def _module(name: str) -> Any:
    try:
        return import_module(MODULES[name])
    except (ImportError, OSError) as error:
        raise Unavailable(f"{name} is installed but does not import: {error}", where=f"backend {name}") from error


@cache
def _messages(trt: Any) -> Messages:
    """One per module and process: TensorRT keeps the first logger it gets."""
    return Messages(trt)


def _set_targets(trt: Any, config: Any, targets: Sequence[str]) -> None:
    # Members are called SM86 or SM120: the last digit is the minor version.
    capabilities: dict[str, Any] = {}
    for name, capability in trt.ComputeCapability.__members__.items():
        digits = re.fullmatch(r"SM(\d+)(\d)", name)
        if digits is not None:
            capabilities[f"{digits[1]}.{digits[2]}"] = capability
    for target in targets:
        if target not in capabilities:
            raise ConfigError(
                f"this version can't build for compute capability {target!r}",
                where="targets",
                hint=f"it builds for {', '.join(capabilities)}",
            )
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(capabilities[target], index)


def _refuse_shape_inputs(network: Any) -> None:
    for i in range(network.num_inputs):
        network_input = network.get_input(i)
        # TensorRT asks for such numbers on the host and in a range of values, which no profile here has.
        if network_input.is_shape_tensor:
            raise StageError(
                "the values of this input decide sizes inside the network; TensorRT has to know them when it builds",
                where=f"input {network_input.name}",
                hint=f"make it a constant: of an ONNX file by `import-onnx: {{values: {{{network_input.name}: …}}}}` "
                "with the number, or the list of numbers, that it always holds; in torch by a plain number for a "
                "tensor, or by sizes taken from another input's shape",
            )


def _prepare(trt: Any, network: Any, taps: Sequence[str]) -> None:
    """Makes taps outputs; lets the builder decompose Attention, as it lacks kernels for float32 and small heads."""
    attention = getattr(trt.LayerType, "ATTENTION_OUTPUT", None)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for i in range(layer.num_outputs if taps else 0):
            output = layer.get_output(i)  # None where it is optional
            if output is not None and output.name in taps and not output.is_network_output:
                network.mark_output(output)
        if attention is not None and layer.type == attention:
            layer.__class__ = trt.IAttentionOutputLayer  # the way to downcast in TensorRT's bindings
            layer.attention.decomposable = True


def _memory(messages: Messages) -> dict[str, int]:
    """Bytes by purpose, from the builder's last sentences about each."""
    sizes: dict[str, int] = {}
    # The builder says this in its log alone.
    for text in messages.of("INFO"):
        for key, phrase in _MEMORY.items():
            match = re.search(rf"{phrase}: (\d+) bytes", text)
            if match is not None:
                sizes[key] = int(match[1])
    return sizes
