"""import-onnx: an ONNX file from elsewhere, raised, named and proved to give what the file itself gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.init.from_files import Look
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import LayerDiff, Report, Scalar
from layerline.pipeline.stage import Stage, Work

if TYPE_CHECKING:
    from layerline.backends.base import Array
    from layerline.backends.light import Light
    from layerline.backends.process_limits import Limits
    from layerline.backends.subprocess_build import Relay
    from layerline.onnx_import.feeds import Fed
    from layerline.onnx_import.normalize_import import Adopted
    from layerline.onnx_import.size_search import Declared, Feeder
    from layerline.onnx_import.symbolic_dims import Places


_MOST_MEMORY = 8.0  # GB
# What onnxruntime, the C++ library and numpy say of memory that they don't get.
_NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation", "Unable to allocate")
_UNHEARD = ("BFLOAT16", "INT4", "UINT4", "FLOAT4", "INT2", "UINT2")


class _Field(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Dimension(_Field):
    """A symbolic size; a number alone fixes it, a word alone renames it."""

    size: PositiveInt | None = None
    """Fixes it."""
    name: str | None = None
    """Renames it; dimensions of one name are one size."""
    min: PositiveInt | None = None
    """Smallest size; found out where it is left open."""
    max: PositiveInt | None = None
    """Greatest size, which becomes the upper bound of the engine's profiles."""
    multiple: PositiveInt | None = None
    """Every size is a multiple of this."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else {"size": raw} if isinstance(raw, int) else raw

    @model_validator(mode="after")
    def _bounds(self) -> Dimension:
        if self.min is not None and self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class Range(_Field):
    """Values that an integer input takes, both ends included."""

    low: int
    high: int


@dataclass(frozen=True)
class _Place:
    """What the import needs of its `Work`, in the process that does it.

    Attributes:
        root: the project's folder.
        sources: where the project's files are read.
        out: where the artifact goes.
        log: what to say goes to the caller.
        limits: what this process may take.
    """

    root: Path
    sources: Path
    out: Path
    log: Relay
    limits: Limits


class ImportOnnx(Stage):
    """Takes a file as it comes: opsets from 11, weights as Constant nodes, initializers that are also inputs, external
    data, functions, nested If and Loop. Its own names stay."""

    name: ClassVar[str] = "import-onnx"
    version: ClassVar[int] = 4
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
    dims: dict[str, Dimension] = Field(default_factory=dict)
    """Sizes that vary, by the name that the file (or the report's table of dimensions) gives them."""
    ranges: dict[str, Range] = Field(default_factory=dict)
    """What integer inputs may hold, by input: `{ids: {low: 0, high: 30521}}`."""
    values: dict[str, float | tuple[float, ...]] = Field(default_factory=dict)
    """Inputs that become constants, each with its number, or the numbers along its one axis: `{sr: 16000,
    shape: [1, 3, 64]}`."""
    probes: PositiveInt = 4
    """Samples of `data` to compare on, beside the first ones and the other sizes."""
    tolerance: float | None = Field(default=None, ge=0)
    """Greatest relative L2 error of a value against the file as given; else a stated multiple of what rounding does to
    the value, measured here."""
    max_memory_gb: PositiveFloat | None = None
    """Memory that the model may take while it is tried and compared, in GB (1e9 bytes), beyond four times the size of
    its files; else 8, or half of this machine's where that is less."""
    max_seconds: PositiveInt = 1800
    """How long the import may take."""

    @classmethod
    def look(cls, path: Path, data: Path | None) -> Look:
        """What belongs to a model, and how samples are cut into feeds for it.

        Raises:
            StageError: it can't be read or fed, or its external data is elsewhere.
            ConfigError: the samples do not fit it.
        """
        from layerline.export.onnx_signature import signature
        from layerline.graph.io import onnx_files
        from layerline.graph.io.wellformed import refuse_broken
        from layerline.onnx_import import feed_sources, symbolic_dims
        from layerline.pipeline.inputs import npz

        light, arrays = onnx_files.read(path), npz.read(data) if data else {}
        refuse_broken(light)
        _refuse_types(light)
        ranks = {k: a.ndim for k, a in arrays.items()}
        places = symbolic_dims.name(light, ranks)
        inputs = signature(light).inputs
        given = feed_sources.given(arrays, inputs, data.name) if data else None
        return Look(
            beside=onnx_files.external_files(light, path),
            inputs=tuple(v.name for v in inputs),
            dims={n: symbolic_dims.told(p) for n, p in places.items()},
            outputs=len(light.model.graph.output),
            whole=tuple(sorted(given.whole)) if given else (),
            numbers={n: a.item() for n, a in sorted(given.numbers.items())} if given else {},
        )

    @classmethod
    def renamed(cls, path: Path, names: Mapping[str, str]) -> bytes:
        """The model with other names for the files that hold its weights."""
        from layerline.graph.io import relocate_weights

        return relocate_weights.renamed(path, names)

    def files(self) -> tuple[str, ...]:
        """The model, its weights and the samples: their content is part of the key."""
        return (self.file, *self.external, *([self.data] if self.data else []))

    def check(self, look: Inspection) -> None:
        from layerline.backends.onnxruntime import OnnxRuntime
        from layerline.export.onnx_signature import signature
        from layerline.export.signature import Dim
        from layerline.graph.io import onnx_files
        from layerline.onnx_import import allocation_sizes, symbolic_dims
        from layerline.onnx_import import feeds as foreign
        from layerline.onnx_import.normalize_import import freeze, take_branches
        from layerline.parity import early_checks

        with look.item("import-onnx.file"):
            arrays = self._arrays(look.root)
            adopted = self._adopt(look.root, look.root, {name: a.ndim for name, a in arrays.items()})
            look.ok("import-onnx.file", f"{self.file}: {len(adopted.light.model.graph.node)} nodes")
            with look.item("import-onnx.dims"):
                declared = self._declare(adopted.light, symbolic_dims.places(adopted.light))
                freeze(adopted.light, self.values)
                adopted = take_branches(adopted)
                limits = self._limits(look.root)
                allocation_sizes.refuse_endless(adopted.light)
                allocation_sizes.refuse_large(adopted.light, limits.memory, limits.hint)
                inputs = signature(adopted.light).inputs
                foreign.ranges(adopted.original, inputs, {n: (r.low, r.high) for n, r in self.ranges.items()})
                known = {n: Dim(min=d.min or 1, max=d.max, multiple=d.multiple or 1)
                         for n, d in declared.items() if d.max}  # fmt: skip
                OnnxRuntime().open(adopted.light)  # says what it can't run, and runs nothing
                look.shared["signature"] = signature(adopted.light, known)
                look.shared["ops"] = {n.op_type for n in onnx_files.nodes(adopted.light.model)}
                look.shared["names"] = early_checks.onnx_names(adopted.light.model)
                look.shared["run"] = partial(self._try, look.root, limits)
                look.ok("import-onnx.dims", ", ".join(f"{v.name} {v.shape}" for v in inputs) or "no inputs")

    def run(self, work: Work) -> Report:
        from layerline.backends import subprocess_build

        limits = self._limits(work.root)
        places = (work.root, work.sources, work.out)
        report: Report = subprocess_build.bounded(_imported, self, *places, limits, limits=limits, log=work.log)
        return report

    def _try(self, root: Path, limits: Limits, feed: Mapping[str, Array]) -> list[Array]:
        """The model's outputs for a feed, in order, from a process that is bounded as that of the import."""
        from layerline.backends import subprocess_build

        tried: list[Array] = subprocess_build.bounded(_tried, self, root, feed, limits=limits, log=_Silent())
        return tried

    def _limits(self, root: Path) -> Limits:
        """What the process may take that runs the model: its weights, several times, and what it computes."""
        from layerline.backends.process_limits import GB, Limits, machine_memory

        stored = sum(path.stat().st_size for name in self.files() if (path := root / name).is_file())
        own = _MOST_MEMORY * GB if self.max_memory_gb is None else self.max_memory_gb * GB
        if self.max_memory_gb is None:
            own = min(own, machine_memory() / 2)
        return Limits(
            memory=int(own) + 4 * stored,
            seconds=self.max_seconds,
            what=f"trying {self.file}",
            hint="import-onnx.max_memory_gb and import-onnx.max_seconds set what it may take",
        )

    def _import(self, work: _Place) -> Report:
        from layerline.export import probe_files
        from layerline.export.onnx_signature import signature
        from layerline.export.signature import bounds
        from layerline.onnx_import import normalize_import, symbolic_dims
        from layerline.onnx_import.compare_in_parts import unchanged

        arrays = self._arrays(work.sources)
        adopted = self._adopt(work.root, work.sources, {name: a.ndim for name, a in arrays.items()})
        declared = self._declare(adopted.light, symbolic_dims.places(adopted.light))
        constants = normalize_import.freeze(adopted.light, self.values)
        if self.values or any(d.size for d in self.dims.values()):
            adopted = normalize_import.take_branches(adopted)
        light = adopted.light
        feeder, fed = self._feed(work, adopted, declared, arrays, constants)
        symbolic_dims.write(light.model, feeder.same, feeder.fixed)
        feeds = [*fed.feeds, *feeder.edges]
        symbolic_dims.settle(light.model, symbolic_dims.places(light), [(f, feeder.run(f)) for f in feeds])
        work.log.say(f"{len(light.model.graph.node)} nodes; comparing every value on {len(feeds)} feeds")
        rows, notes = unchanged(adopted, [feeder.whole(f) for f in feeds], feeder.elements, self.tolerance)
        complaint = _write(light, work.out)
        probe_files.save(work.out, fed.feeds)
        signature(light, feeder.dims, fed.ranges).save(work.out)
        return Report(
            stage=self.name,
            reference=f"{self.file} on onnxruntime",
            candidate="imported onnx on onnxruntime",
            records=rows,
            notes=(*adopted.notes, *feeder.notes, *_by_trial(feeder), *notes, *_nonfinite(rows), *complaint),
            metrics={**_metrics(adopted, rows, len(feeds)), **bounds(feeder.dims, feeder.fixed)},
            tables=_tables(light, feeder, fed),
        )

    def _adopt(self, root: Path, sources: Path, ranks: Mapping[str, int]) -> Adopted:
        """The model with names for everything, as it is and as the pipeline goes on with it; read from `sources`."""
        from layerline.graph.io import module_identity, onnx_files
        from layerline.graph.io.wellformed import refuse_broken
        from layerline.onnx_import import normalize_import, symbolic_dims

        original, path = root / self.file, sources / self.file
        stored = onnx_files.external_files(onnx_files.read(path), original)
        inside = [(original.parent / name).relative_to(root).as_posix() for name in stored]
        if missing := [name for name in inside if name not in self.external]:
            raise ConfigError(
                f"{self.file} stores weights in {missing[0]}, whose content would be no part of the key",
                where="import-onnx.external",
                hint=f"list it: external: [{', '.join(inside)}]",
            )
        given = onnx_files.parts(path)
        refuse_broken(given)
        _refuse_types(given)
        symbolic_dims.name(given, ranks)
        module_identity.stamp(given.model, root)
        return normalize_import.adopt(given, self.opset)

    def _arrays(self, sources: Path) -> Mapping[str, Any]:
        from layerline.pipeline.inputs import npz

        return npz.read(sources / self.data) if self.data else {}

    def _declare(self, light: Light, places: Places) -> dict[str, Declared]:
        """Applies `dims` to the model, in place; the bounds that are left, by final name."""
        from layerline.onnx_import import symbolic_dims
        from layerline.onnx_import.size_search import Declared

        for unknown in self.dims.keys() - places.keys():
            there = "; ".join(f"{n} ({symbolic_dims.told(p)})" for n, p in places.items()) or "none"
            raise ConfigError(f"there is no dimension {unknown!r}", where=f"dims.{unknown}", hint=f"there are: {there}")
        symbolic_dims.write(
            light.model,
            {n: d.name for n, d in self.dims.items() if d.name},
            {n: d.size for n, d in self.dims.items() if d.size},
        )
        found: dict[str, Declared] = {}
        for name, d in self.dims.items():
            bounds = Declared(min=d.min, max=d.max, multiple=d.multiple)
            if bounds != Declared() and found.setdefault(d.name or name, bounds) != bounds:
                raise ConfigError(f"two dimensions named {d.name!r} have other bounds", where=f"dims.{name}")
        return found

    def _feed(
        self,
        work: _Place,
        adopted: Adopted,
        declared: Mapping[str, Declared],
        arrays: Mapping[str, Any],
        constants: Mapping[str, Array],
    ) -> tuple[Feeder, Fed]:
        from layerline.backends.tensorrt.checks import refuse_training
        from layerline.export.onnx_signature import signature
        from layerline.onnx_import import feed_sources
        from layerline.onnx_import import feeds as foreign
        from layerline.onnx_import.size_search import Feeder

        _refuse_beyond(work, adopted.light)
        refuse_training(adopted.light)
        inputs = signature(adopted.light).inputs
        if not inputs:
            raise StageError("the model takes no inputs, so there is nothing to speed up", where=self.file)
        feeder = Feeder(model=adopted.original, inputs=inputs, declared=declared, constants=constants)
        ranges = foreign.ranges(adopted.original, inputs, {n: (r.low, r.high) for n, r in self.ranges.items()})
        if self.data:
            given = feed_sources.given({n: a for n, a in arrays.items() if n not in constants}, inputs, self.data)
            return feeder, foreign.from_samples(feeder, given, self.probes, ranges)
        work.log.say("no samples given: looking for inputs that the model takes")
        return feeder, foreign.from_nothing(feeder, ranges)


class _Silent:
    def say(self, text: str) -> None: ...


def _tried(stage: ImportOnnx, root: Path, feed: Mapping[str, Array], _log: Relay) -> list[Array]:
    """The outputs of the model that a project's file holds, in its own process."""
    from layerline.backends.onnxruntime import OnnxRuntime
    from layerline.onnx_import import symbolic_dims
    from layerline.onnx_import.normalize_import import freeze, take_branches

    adopted = stage._adopt(root, root, {name: array.ndim for name, array in stage._arrays(root).items()})
    stage._declare(adopted.light, symbolic_dims.places(adopted.light))
    freeze(adopted.light, stage.values)
    session = OnnxRuntime().open(take_branches(adopted).light)
    outputs = session.run(feed)
    return [outputs[name] for name in session.outputs]


def _imported(stage: ImportOnnx, root: Path, sources: Path, out: Path, limits: Limits, log: Relay) -> Report:
    """The import in its own process.

    Raises:
        StageError: as the stage's run; where memory ran out, with the limit.
    """
    try:
        return stage._import(_Place(root, sources, out, log, limits))
    except StageError as error:
        if any(words in error.what for words in _NO_MEMORY):
            raise StageError(error.what, where=error.where, hint=limits.hint) from error
        raise


def _refuse_beyond(work: _Place, light: Light) -> None:
    """Refuses what can't be run within the limits, whatever it is fed with; notes the loops down, for the error of a
    run that has to be ended.

    Raises:
        StageError: names the node.
    """
    from layerline.onnx_import import allocation_sizes

    allocation_sizes.refuse_endless(light)
    allocation_sizes.refuse_large(light, work.limits.memory, work.limits.hint)
    for node, rounds in list(allocation_sizes.loops(light.model))[:3]:
        told = "an unknown number of" if rounds is None else f"up to {rounds}"
        work.log.suspect(f"its Loop node {node.name or node.output[0]} runs {told} rounds")


def _refuse_types(light: Light) -> None:
    """Refuses inputs and outputs of types that numpy has not and onnxruntime passes to nobody.

    Raises:
        StageError: names the first.
    """
    import onnx

    for what, values in (("input", light.fed), ("output", light.model.graph.output)):
        for value in values:
            code = value.type.tensor_type.elem_type
            if code not in onnx.TensorProto.DataType.values():
                raise StageError(f"the {what} is of element type {code}, which ONNX has not", where=value.name)
            kind = onnx.TensorProto.DataType.Name(code)
            if kind.startswith(_UNHEARD if what == "output" else (*_UNHEARD, "FLOAT8")):
                raise StageError(
                    f"the {what} is {kind.lower()}, which numpy has not, so that nobody can feed or read it",
                    where=value.name,
                    hint="put a Cast to float32 behind that input, or before that output",
                )


def _by_trial(feeder: Feeder) -> list[str]:
    found = [f"{n} {d.min} to {d.max}" for n, d in feeder.dims.items() if n not in feeder.declared]
    return [f"sizes found by trial on onnxruntime: {', '.join(found)}; `dims` sets those you need"] if found else []


def _nonfinite(rows: Sequence[LayerDiff]) -> list[str]:
    """Equal is not right: what holds NaN or Inf in the file as well says so."""
    both = [r for r in rows if r.nonfinite_a]
    return [f"{len(both)} values hold NaN or Inf in the file as given, first {both[0].name}"] if both else []


def _write(light: Light, folder: Path) -> list[str]:
    """Saves the model and checks the file; in words, what onnx has against it that onnxruntime has not.

    Raises:
        StageError: it is not valid ONNX.
    """
    import onnx

    from layerline.graph.io import onnx_files

    path = onnx_files.save(light, folder)
    if open_ranks := [o.name for o in light.model.graph.output if not o.type.tensor_type.HasField("shape")]:
        return [f"output {open_ranks[0]} has no one rank, so onnx's checker refuses the file; onnxruntime runs it"]
    for full in (False, True):
        try:
            onnx.checker.check_model(str(path), full_check=full)
        except Exception as error:
            text = " ".join(str(error).split())
            if full:
                return [f"onnx's shape inference objects, onnxruntime does not: {text:.300}"]
            raise StageError(f"not valid ONNX: {text:.500}", where="model.onnx") from error
    return []


def _metrics(adopted: Adopted, rows: Sequence[LayerDiff], feeds: int) -> dict[str, Scalar]:
    from layerline.graph.analysis.rounding_noise import drawn, unjudged
    from layerline.graph.io.opset import opset_of

    model = adopted.light.model
    random = drawn(model)
    return {
        **unjudged(model.graph, random),
        "nodes": len(model.graph.node),
        "values_compared": sum(r.name not in random for r in rows),
        "feeds": feeds,
        "opset_before": opset_of(adopted.original.model),
        "opset": opset_of(model),
    }


def _tables(light: Light, feeder: Feeder, fed: Fed) -> dict[str, list[dict[str, Scalar]]]:
    """What each input was fed with, and the sizes that the model is known to take."""
    from layerline.export.onnx_signature import signature
    from layerline.onnx_import import symbolic_dims

    shown: list[dict[str, Scalar]] = [
        {"input": v.name, "type": v.dtype, "shape": ", ".join(map(str, v.shape)), "fed with": fed.values[v.name]}
        for v in signature(light).inputs
    ]
    sizes: list[dict[str, Scalar]] = [
        {
            "dimension": name,
            "where": symbolic_dims.told(places),
            "min": feeder.dims[name].min,
            "max": feeder.dims[name].max,
            "multiple": feeder.dims[name].multiple,
            "told by": "dims" if name in feeder.declared else "trial",
        }
        for name, places in symbolic_dims.places(light).items()
    ]
    return {"inputs": shown, "dimensions": sizes} if sizes else {"inputs": shown}
