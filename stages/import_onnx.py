"""import-onnx: an ONNX file from elsewhere, raised, named and proved to give what the file itself gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from layerline.pipeline.config.field_types import Dim, Dimension, Range
from layerline.pipeline.errors import ConfigError, PipeError, StageError
from layerline.pipeline.init.from_files import Look
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.wording import quantity

if TYPE_CHECKING:
    import onnx_ir as ir

    from layerline.backends.base import Array
    from layerline.backends.subprocess_build import Limits, OutputLog, Relay
    from layerline.export.signature import Signature
    from layerline.onnx_import.feeds import Fed
    from layerline.onnx_import.normalize_import import Adopted
    from layerline.onnx_import.size_search import Feeder
    from layerline.onnx_import.symbolic_dims import Places


_MOST_MEMORY = 8.0  # GB
# Messages of onnxruntime, the C++ library and numpy when an allocation fails.
_NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation", "Unable to allocate")


class ImportedDim(Dimension):
    """A symbolic size; a number alone fixes it, a word alone renames it."""

    size: PositiveInt | None = None
    """Fixes it."""
    name: str | None = None
    """Renames it; dimensions of one name are one size."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            return {"name": raw}
        if isinstance(raw, int):
            return {"size": raw}
        return raw

    @model_validator(mode="after")
    def _fixed_or_varied(self) -> ImportedDim:
        if self.size is not None:
            others = [name for name in ("name", "min", "max", "multiple") if getattr(self, name) is not None]
            if others:
                raise ValueError(f"size {self.size} fixes it, so it has no {' and no '.join(others)}: keep one of them")
        return self


class ImportOnnx(Stage):
    """Takes a file as it comes: opsets from 11, weights as Constant nodes, initializers that are also inputs, external
    data, functions, nested If and Loop. Its own names stay."""

    name: ClassVar[str] = "import-onnx"
    version: ClassVar[int] = 7
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "onnx"
    env: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnxruntime")
    unkeyed: ClassVar[frozenset[str]] = frozenset({"max_memory_gb", "max_seconds"})

    file: str
    """The model, inside the project."""
    external: tuple[str, ...] = ()
    """Files that hold its weights, where they lie beside it; inside the project."""
    data: str | None = None
    """An .npz with one array per input, whose first axis counts samples; without it, inputs are drawn at random."""
    opset: int = Field(default=20, ge=11)
    """Older files are raised to this version of ONNX's operators; newer ones stay as they are."""
    dims: dict[str, ImportedDim] = Field(default_factory=dict)
    """Sizes that vary, by the name that the file (or the report's table of dimensions) gives them."""
    ranges: dict[str, Range] = Field(default_factory=dict)
    """What integer inputs may hold, by input: `{ids: [0, 30521]}`."""
    values: dict[str, float | tuple[float, ...]] = Field(default_factory=dict)
    """Inputs that become constants, each with its number, or the numbers along its one axis: `{sr: 16000,
    shape: [1, 3, 64]}`."""
    probes: PositiveInt = 4
    """Samples of `data` to compare on, beside the first ones and the other sizes."""
    tolerance: float | None = Field(default=None, ge=0)
    """Greatest relative L2 error of a value against the file as given; else a multiple of what rounding does to it."""
    max_memory_gb: PositiveFloat | None = None
    """Memory that the model may take while it is tried, in GB, beyond four times the size of its files; else 8, or half
    of this machine's where that is less."""
    max_seconds: PositiveInt = 1800
    """How long the import may take."""

    @classmethod
    def look(cls, path: Path, data: Path | None) -> Look:
        """What belongs to a model, and how samples are cut into feeds for it."""
        from layerline.export.signature import signature
        from layerline.graph.io import onnx_files
        from layerline.graph.io.ir_convert import as_ir
        from layerline.graph.io.wellformed import refuse_broken
        from layerline.onnx_import import feed_sources, symbolic_dims
        from layerline.pipeline.inputs import npz

        light = onnx_files.read(path)
        arrays = npz.read(data) if data else {}
        refuse_broken(light)
        beside = onnx_files.external_files(light, path)
        model = as_ir(light)
        symbolic_dims.name(model, arrays)
        inputs = signature(model).inputs
        look = Look(
            beside=beside,
            inputs=tuple(value.name for value in inputs),
        )
        if not data:
            return look
        samples = feed_sources.samples(arrays, inputs, data.name)
        return replace(look, whole=tuple(sorted(samples.whole)), numbers=tuple(sorted(samples.numbers)))

    def files(self) -> tuple[str, ...]:
        """The model, its weights and the samples: their content is part of the key."""
        files = (self.file, *self.external)
        if self.data:
            files += (self.data,)
        return files

    def check(self, look: Inspection) -> None:
        with look.item("import-onnx.file"):
            looked: _Looked = self._isolated(_looked, look.root, log=_Silent())
            look.ok("import-onnx.file", f"{self.file}: {looked.nodes} nodes")
            with look.item("import-onnx.dims"):
                if looked.signature is None:
                    raise looked.error
                look.shared["signature"] = looked.signature
                look.shared["ops"] = looked.ops
                look.shared["names"] = looked.names
                look.shared["run"] = lambda feed: self._isolated(_tried, look.root, feed, log=_Silent())
                shapes = [f"{value.name} {value.shape}" for value in looked.signature.inputs]
                look.ok("import-onnx.dims", ", ".join(shapes) or "no inputs")

    def run(self, work: Work) -> Report:
        report: Report = self._isolated(ImportOnnx._import, work.root, work.sources, work.out, log=work.log)
        return report

    def _isolated(self, function: Callable[..., Any], root: Path, *args: Any, log: OutputLog) -> Any:
        """What `function(self, root, limits, *args)` gives in a process of bounded memory and time."""
        from layerline.backends.subprocess_build import GB, Limits, bounded, machine_memory

        # A model is a program of strangers: it runs where memory and time are bounded.
        files = [root / name for name in self.files()]
        stored = sum(path.stat().st_size for path in files if path.is_file())
        computed = min(_MOST_MEMORY * GB, machine_memory() / 2)
        if self.max_memory_gb is not None:
            computed = self.max_memory_gb * GB
        limits = Limits(
            # The weights several times: read, parsed, optimised and in both models that are compared.
            memory=int(computed) + 4 * stored,
            seconds=self.max_seconds,
            what=f"trying {self.file}",
            hint="import-onnx.max_memory_gb and import-onnx.max_seconds set what it may take",
        )
        try:
            return bounded(function, self, root, limits, *args, limits=limits, log=log)
        except StageError as error:
            if any(words in error.what for words in _NO_MEMORY):
                raise StageError(error.what, where=error.where, hint=limits.hint) from error
            raise

    def _import(self, root: Path, limits: Limits, sources: Path, out: Path, log: Relay) -> Report:
        """The import, in its own process."""
        from layerline.export import probe_files
        from layerline.export.signature import bounds, signature
        from layerline.onnx_import import import_report, symbolic_dims

        arrays = self._arrays(sources)
        adopted = self._adopt(root, sources, arrays)
        adopted, declared, constants = self._settle(adopted, limits)
        model = adopted.model
        feeder, fed = self._feed(log, adopted, declared, arrays, constants)
        # Sizes that only run together get one name, and those that never vary become numbers.
        symbolic_dims.write(model, feeder.same, feeder.fixed)
        feeds = [*fed.feeds, *feeder.edges]
        runs = [(feed, feeder.run(feed)) for feed in feeds]
        symbolic_dims.settle(model, symbolic_dims.places(model), runs)
        log.say(f"{quantity(len(model.graph), 'node')}; comparing every value on {quantity(len(feeds), 'feed')}")
        rows, notes = import_report.unchanged(adopted, [feeder.whole(feed) for feed in feeds], self.tolerance)
        unchecked = import_report.save_checked(model, out)
        probe_files.save(out, fed.feeds)
        signature(model, feeder.dims, fed.ranges).save(out)
        return Report(
            stage=self.name,
            reference=f"{self.file} on onnxruntime",
            candidate="imported onnx on onnxruntime",
            records=rows,
            notes=(*adopted.notes, *feeder.notes, *notes, *import_report.nonfinite(rows), *unchecked),
            metrics={**import_report.metrics(adopted, rows, len(feeds)), **bounds(feeder.dims, feeder.fixed)},
            tables=import_report.tables(model, feeder, fed),
        )

    def _adopt(self, root: Path, sources: Path, arrays: Mapping[str, Array]) -> Adopted:
        """Reads the model from `sources` and names everything in it; as in the file, and as later stages use it."""
        from layerline.graph.io import module_identity, onnx_files
        from layerline.graph.io.ir_convert import as_ir
        from layerline.graph.io.wellformed import refuse_broken
        from layerline.onnx_import import normalize_import, symbolic_dims

        original = root / self.file
        path = sources / self.file
        weight_files = onnx_files.external_files(onnx_files.read(path), original)
        inside = [(original.parent / name).relative_to(root).as_posix() for name in weight_files]
        for name in inside:
            if name not in self.external:
                raise ConfigError(
                    f"{self.file} stores weights in {name}, whose content would be no part of the key",
                    where="import-onnx.external",
                    hint=f"list it: external: [{', '.join(inside)}]",
                )
        light = onnx_files.parts(path)
        refuse_broken(light)
        model = as_ir(light)
        symbolic_dims.name(model, arrays)
        module_identity.stamp(model, root)
        module_identity.distrust(model)
        return normalize_import.adopt(model, self.opset)

    def _settle(self, adopted: Adopted, limits: Limits) -> tuple[Adopted, dict[str, Dimension], dict[str, Array]]:
        """Applies `dims` and `values`, and takes the branches that they decide; bounds of dimensions, and constants."""
        from layerline.onnx_import import allocation_sizes, normalize_import, symbolic_dims

        declared = self._declare(adopted.model, symbolic_dims.places(adopted.model))
        # Inputs that become constants may decide branches, and with them what has to be held in memory.
        constants = normalize_import.freeze(adopted.model, self.values)
        # Before anything of the file is computed, and again once branches are decided.
        allocation_sizes.refuse_unbounded(adopted.model, limits.memory, limits.hint)
        if self.values or any(dim.size for dim in self.dims.values()):
            adopted = normalize_import.take_branches(adopted)
            allocation_sizes.refuse_unbounded(adopted.model, limits.memory, limits.hint)
        return adopted, declared, constants

    def _arrays(self, sources: Path) -> Mapping[str, Any]:
        from layerline.pipeline.inputs import npz

        if not self.data:
            return {}
        return npz.read(sources / self.data)

    def _declare(self, model: ir.Model, places: Places) -> dict[str, Dimension]:
        """Applies `dims` to the model, in place; the bounds that are left, by final name."""
        from layerline.onnx_import import symbolic_dims

        for name in self.dims:
            if name not in places:
                listed = [f"{dim} ({symbolic_dims.as_text(where)})" for dim, where in places.items()]
                hint = f"there are: {'; '.join(listed) or 'none'}"
                raise ConfigError(f"there is no dimension {name!r}", where=f"dims.{name}", hint=hint)
        new_names = {name: dim.name for name, dim in self.dims.items() if dim.name}
        sizes = {name: dim.size for name, dim in self.dims.items() if dim.size}
        symbolic_dims.write(model, new_names, sizes)
        declared: dict[str, Dimension] = {}
        for name, dim in self.dims.items():
            bounds = Dimension(min=dim.min, max=dim.max, multiple=dim.multiple)
            if bounds != Dimension() and declared.setdefault(dim.name or name, bounds) != bounds:
                raise ConfigError(f"two dimensions named {dim.name!r} have other bounds", where=f"dims.{name}")
        return declared

    def _feed(
        self,
        log: Relay,
        adopted: Adopted,
        declared: Mapping[str, Dimension],
        arrays: Mapping[str, Any],
        constants: Mapping[str, Array],
    ) -> tuple[Feeder, Fed]:
        from layerline.export.signature import signature
        from layerline.graph.analysis.refusals import refuse_training
        from layerline.onnx_import import allocation_sizes, feed_sources
        from layerline.onnx_import import feeds as foreign
        from layerline.onnx_import.size_search import Feeder

        # Named in the error, should the process run out of its time.
        for loop in allocation_sizes.described_loops(adopted.model):
            log.suspect(loop)
        refuse_training(adopted.model)
        inputs = signature(adopted.model).inputs
        if not inputs:
            raise StageError("the model takes no inputs, so there is nothing to speed up", where=self.file)
        feeder = Feeder(model=adopted.original, inputs=inputs, declared=declared, constants=constants)
        declared_ranges = {name: (values.low, values.high) for name, values in self.ranges.items()}
        ranges = foreign.ranges(adopted.original, inputs, declared_ranges)
        if self.data:
            fed_arrays = {name: array for name, array in arrays.items() if name not in constants}
            samples = feed_sources.samples(fed_arrays, inputs, self.data)
            return feeder, foreign.from_samples(feeder, samples, self.probes, ranges)
        log.say("no samples given: looking for inputs that the model takes")
        return feeder, foreign.from_nothing(feeder, ranges)


class _Silent:
    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class _Looked:
    """What `check` tells of a file."""

    nodes: int
    signature: Signature | None = None  # None where `error` says why there is none
    ops: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()  # of values, nodes and modules
    error: PipeError = field(default_factory=lambda: PipeError(""))


def _looked(stage: ImportOnnx, root: Path, limits: Limits, _log: Relay) -> _Looked:
    """Reads the model and opens it on onnxruntime, in a process of its own; runs nothing of it."""
    from layerline.backends.onnxruntime import OnnxRuntime
    from layerline.export.signature import signature
    from layerline.graph.analysis.ir_queries import model_nodes
    from layerline.graph.io import module_identity
    from layerline.onnx_import import feeds as foreign

    adopted = stage._adopt(root, root, stage._arrays(root))
    nodes = len(adopted.model.graph)
    try:
        adopted, declared, _ = stage._settle(adopted, limits)
        ranges = {name: (values.low, values.high) for name, values in stage.ranges.items()}
        foreign.ranges(adopted.original, signature(adopted.model).inputs, ranges)
        OnnxRuntime().open(adopted.model)  # raises on what it can't run
    except PipeError as error:
        return _Looked(nodes, error=error)
    dims: dict[str, Dim] = {}
    for name, dim in declared.items():
        if dim.max:
            dims[name] = Dim(min=dim.min or 1, max=dim.max, multiple=dim.step)
    ops = frozenset(node.op_type for node in model_nodes(adopted.model))
    return _Looked(nodes, signature(adopted.model, dims), ops, frozenset(module_identity.all_names(adopted.model)))


def _tried(stage: ImportOnnx, root: Path, limits: Limits, feed: Mapping[str, Array], _log: Relay) -> list[Array]:
    """The outputs of the model that a project's file holds, in its own process."""
    from layerline.backends.onnxruntime import OnnxRuntime

    adopted, _, _ = stage._settle(stage._adopt(root, root, stage._arrays(root)), limits)
    session = OnnxRuntime().open(adopted.model)
    outputs = session.run(feed)
    return [outputs[name] for name in session.outputs]
