"""engine: refuses what TensorRT can't build, builds the engine, and reports what it consists of."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.keys.env import fact
from layerline.pipeline.report import Gate, Report, Scalar
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.wording import quantity

if TYPE_CHECKING:
    import onnx_ir as ir

    from layerline.backends.tensorrt.builder import Built, TensorRT
    from layerline.backends.tensorrt.profiles import Profile
    from layerline.export.signature import Signature

PLAN, RECORD, LAYERS = "engine.plan", "engine.json", "layers.json"


class MinOptMax(BaseModel):
    """`[min, opt, max]` or the same by name: three sizes of a dimension."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: StrictInt
    opt: StrictInt
    max: StrictInt

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if len(value) != 3:
            raise ValueError(f"expected [min, opt, max], got {len(value)} values")
        return dict(zip(("min", "opt", "max"), value, strict=True))

    @model_validator(mode="after")
    def _in_order(self) -> MinOptMax:
        if not self.min <= self.opt <= self.max:
            raise ValueError("expected min <= opt <= max")
        return self


class Engine(Stage):
    """Builds with `tensorrt` where it is installed and a device is there, else ahead of time with TensorRT-RTX.

    Leaves `engine.plan`, `engine.json` (what it was built with and what it consists of) and `layers.json` (every layer
    of the network with the ONNX node and module it came from). Where a device can run the engine it is measured against
    onnxruntime on the probes; elsewhere the report says that it was not run, and shows no numbers.
    """

    name: ClassVar[str] = "engine"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "quantized"}
    gives: ClassVar[str] = "engine"
    env: ClassVar[tuple[str, ...]] = ("tensorrt", "tensorrt-rtx", "gpu")

    runtime: Literal["auto", "tensorrt", "tensorrt-rtx"] = "auto"
    """Which TensorRT builds the engine."""
    profiles: tuple[dict[str, MinOptMax], ...] = ()
    """Optimisation profiles, each with `[min, opt, max]` by dimension name. Without any, one profile spans the bounds
    the model was exported for."""
    workspace_mb: int | None = Field(default=None, gt=0)
    """Greatest scratch memory a layer may use, in MiB; without it, all the device has."""
    targets: tuple[Annotated[str, Field(coerce_numbers_to_str=True)], ...] = ()
    """Compute capabilities to build for (`"8.6"`), TensorRT-RTX only; without any, its own choice."""
    tolerance: float = Field(default=0.05, gt=0)
    """Greatest relative L2 error of an output against onnxruntime, where a device runs the engine."""

    def check(self, look: Inspection) -> None:
        with look.item("engine.profiles"):
            signature = look.need("signature")
            if self.profiles:  # the default profile depends on sizes that only the stages before find out
                resolved = quantity(len(self._resolved(signature)), "profile")
                look.ok("engine.profiles", f"{resolved}, of sizes that the model takes")
        with look.item("engine.targets"):
            from layerline.graph.quantization.targets import FORMATS, lacking

            for name in look.need("formats"):
                reason = lacking(self.targets, FORMATS[name].weight)
                if reason:
                    raise ConfigError(
                        reason, where="engine.targets", hint=f"quantize uses {name}; change one of the two"
                    )
        with look.item("engine.runtime"):
            backend, why = self._choose(())
            look.ok("engine.runtime", f"{backend.name}: {why}")

    def run(self, work: Work) -> Report:
        from layerline.backends.tensorrt import build_record, checks
        from layerline.backends.tensorrt.network import compute_precisions
        from layerline.compare.backend_compare import compare_engine
        from layerline.export import probe_files
        from layerline.export.signature import Signature
        from layerline.graph.io import onnx_files

        folder = work.inputs["model"]
        path = folder / onnx_files.FILE
        model, signature = onnx_files.read_model(path), Signature.load(folder)
        # Profiles are made from the signature, so it has to be that of this file.
        _check_signature(model, signature)
        profiles = self._resolved(signature)
        # Before the build: the builder accepts some faults silently, and reports others without a name.
        narrowed = checks.examine(model, self.targets)
        backend, why = self._choose(profiles)
        work.log.say(f"building with {backend.name}: {why}")
        onnx_names = build_record.names(model)
        start = time.perf_counter()
        built = _build(backend, path, model, onnx_names.modules)
        # Timings are shown, but stand in no file: the same model gives the same artifact.
        seconds = time.perf_counter() - start
        facts: dict[str, Any] = {
            "runtime": backend.name,
            "reason": why,
            "device": fact("gpu"),
            "workspace_mb": backend.workspace_mb,
            "onnx_bytes": sum(p.stat().st_size for p in folder.iterdir() if p.name.startswith("model.onnx")),
            "float64_as_float32": narrowed,
        }
        (work.out / PLAN).write_bytes(built.plan)
        record = build_record.engine_json(built, profiles, **facts)
        layers = build_record.layers_json(built.layers, onnx_names)
        # Sorted keys, so that the same content gives the same bytes.
        for name, content in ((RECORD, record), (LAYERS, layers)):
            (work.out / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
        rows = build_record.diffs(built.layers, onnx_names)
        probes = probe_files.load(folder)
        # Rows without figures where no device is there to run the engine.
        rows, notes = compare_engine(backend, path, work.out / PLAN, probes, rows, self.tolerance)
        for note in notes:
            work.log.say(note)
        return Report(
            stage=self.name,
            reference="onnx on onnxruntime",
            candidate=f"{backend.name} {built.version}",
            records=rows,
            metrics={
                "engine_bytes": len(built.plan),
                **{f"compute_{precision}": n for precision, n in compute_precisions(built.layers).items()},
                "layers": len(built.layers),
                **_axes(signature, profiles),
                "onnx_bytes": facts["onnx_bytes"],
                "build_seconds": round(seconds, 3),
            },
            gates=_gates(built),
            notes=(
                f"Built with {backend.name} {built.version}: {why}.",
                *build_record.in_words(built, narrowed),
                *notes,
            ),
            tables=_tables(built, profiles),
        )

    def _resolved(self, signature: Signature) -> tuple[Profile, ...]:
        from layerline.backends.tensorrt.profiles import Sizes, resolve

        requested: list[dict[str, Sizes]] = []
        for profile in self.profiles:
            entries = {}
            for dim, sizes in profile.items():
                entries[dim] = Sizes(sizes.min, sizes.opt, sizes.max)
            requested.append(entries)
        return resolve({v.name: v.shape for v in signature.inputs}, signature.dims, requested, "engine.profiles")

    def _choose(self, profiles: Sequence[Profile]) -> tuple[TensorRT, str]:
        """The TensorRT to build with, and the reason for the choice."""
        from layerline.backends.tensorrt.builder import TensorRT

        # TensorRT times kernels on the device that it builds on, so it is preferred where there is one.
        lacking = TensorRT("tensorrt").build_reason()
        name: str = self.runtime
        if name != "auto":
            why = "`runtime` asks for it"
        elif self.targets:
            name, why = "tensorrt-rtx", "`targets` are set, and only TensorRT-RTX builds for other devices"
        elif lacking is None:
            name, why = "tensorrt", "it is installed and there is a device"
        else:
            name, why = "tensorrt-rtx", f"{lacking}, and TensorRT-RTX builds ahead of time"
        if self.targets and name == "tensorrt":
            raise ConfigError("tensorrt builds only for this machine's device", where="targets")
        backend = TensorRT(name, profiles=profiles, workspace_mb=self.workspace_mb, targets=self.targets)
        reason = backend.build_reason()
        if reason:
            raise Unavailable(reason, where="stage engine")
        return backend, why


def _check_signature(model: ir.Model, signature: Signature) -> None:
    """Checks that the signature, from which profiles are made, has the same inputs as the file."""
    from layerline.graph.analysis.ir_queries import fed

    declared = {value.name or "": value.shape or () for value in fed(model)}
    signed = {v.name: v.shape for v in signature.inputs}
    if set(declared) != set(signed):
        raise StageError(
            f"model.onnx takes {', '.join(sorted(declared))}, signature.json says {', '.join(sorted(signed))}",
            where="signature.json",
        )
    for name, dims in declared.items():
        # Dynamic sizes may have other names on the two sides; only fixed ones are compared.
        sizes = [dim if isinstance(dim, int) and dim >= 0 else "?" for dim in dims]
        if sizes != [size if isinstance(size, int) else "?" for size in signed[name]]:
            shapes = [", ".join(map(str, shape)) for shape in (sizes, signed[name])]
            raise StageError(
                f"has the shape ({shapes[0]}) in model.onnx, ({shapes[1]}) in signature.json", where=f"input {name}"
            )


def _build(backend: TensorRT, path: Path, model: ir.Model, modules: Mapping[str, str]) -> Built:
    from layerline.backends.tensorrt import checks

    try:
        return backend.build(path, modules=modules)
    except StageError as error:
        if error.where != "engine":  # it names a node
            raise
        suspects = checks.suspects(model)
        if not suspects:
            raise
        hint = f"it names no node; the model has what TensorRT is known to fail on: {'; '.join(suspects[:3])}"
        raise StageError(error.what, where=error.where, hint=hint) from error


def _axes(signature: Signature, profiles: Sequence[Profile]) -> dict[str, str]:
    """The sizes that the profiles admit: for each dimension, the bounds over all profiles."""
    from layerline.export.signature import bounds
    from layerline.pipeline.config.field_types import Dim

    admitted: dict[str, Dim] = {}
    for value in signature.inputs:
        for axis, name in enumerate(value.shape):
            sizes = [profile[value.name].sizes(axis) for profile in profiles if value.name in profile]
            if isinstance(name, str) and sizes:
                admitted[name] = Dim(min=min(s.min for s in sizes), max=max(s.max for s in sizes))
    return bounds(admitted)


def _gates(built: Built) -> tuple[Gate, ...]:
    """Fails an engine whose products all compute in float although it quantises: it only pays for Q/DQ."""
    from layerline.backends.tensorrt.build_record import FLOAT
    from layerline.backends.tensorrt.network import compute_precisions

    if not any(layer.type == "QUANTIZE" for layer in built.layers):
        return ()
    # One product in a quantised type is enough: some layers stay float on purpose.
    precisions = compute_precisions(built.layers)
    in_words = ", ".join(f"{n} in {precision}" for precision, n in precisions.items()) or "none"
    return (
        Gate(
            name="quantisation reaches the arithmetic",
            passed=not precisions or any(precision not in FLOAT for precision in precisions),
            seen=f"convolutions and matrix products: {in_words}",
            expected="at least one that takes both operands dequantised",
            hint="quantise the weights of the layers whose inputs are quantised",
        ),
    )


def _tables(built: Built, profiles: Sequence[Profile]) -> dict[str, list[dict[str, Scalar]]]:
    tables: dict[str, list[dict[str, Scalar]]] = {}
    rows: list[dict[str, Scalar]] = []
    for index, profile in enumerate(profiles):
        for name, shapes in profile.items():
            row: dict[str, Scalar] = {"profile": index, "input": name}
            for label, shape in (("min", shapes.min), ("opt", shapes.opt), ("max", shapes.max)):
                row[label] = "x".join(map(str, shape))
            rows.append(row)
    if rows:
        tables["profiles"] = rows
    if built.warnings:
        tables["builder warnings"] = [{"warning": text, "times": n} for text, n in built.warnings.items()]
    return tables
