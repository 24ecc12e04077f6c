"""The fuse stage: a smaller graph with the same numbers, each rewrite proved on real inputs and listed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.report import LayerDiff, Report, Scalar
from layerline.pipeline.stage import Stage, Work

if TYPE_CHECKING:
    import onnx

    from layerline.backends.base import Feed
    from layerline.backends.light import Light
    from layerline.graph.fusion.apply_rules import Rewritten
    from layerline.graph.fusion.firing import Firing
    from layerline.graph.fusion.fuse import Fused
    from layerline.graph.fusion.rule import Rule
    from layerline.parity.default_session import Shipped

COPIED = ("signature.json", "probes.safetensors", "floor.json")
TABLE_ROWS = 200


def _rule_name(name: str) -> str:
    """Refuses a name that no rule has, where pipe.yaml has its line; asked only where rules are named at all."""
    from layerline.graph.fusion.apply_rules import select

    try:
        select({name: True})
    except ConfigError as error:
        raise PydanticCustomError("told", "{what}", {"what": error.what, "hint": error.hint}) from None
    return name


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What goes in: the unfused model, real feeds, and how far rounding may move each value."""

    unfused: Light
    feeds: Sequence[Feed]
    floors: Mapping[str, float]
    notes: Sequence[str]


class Fuse(Stage):
    """Folds constants and merges nodes; nothing here changes numbers beyond rounding."""

    name: ClassVar[str] = "fuse"
    version: ClassVar[int] = 7
    takes: ClassVar[Mapping[str, str]] = {"model": "onnx"}
    gives: ClassVar[str] = "fused"
    env: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx-ir", "onnxruntime")

    rules: dict[Annotated[str, AfterValidator(_rule_name)], bool] = Field(default_factory=dict)
    """Rules switched off (or on) by name; those not named are on. docs/fusion.md lists them."""
    fold_limit: int = Field(default=1 << 20, ge=0)
    """Bytes that one folded constant may add to the file beyond what it frees; all together add no more than that
    either, or than a tenth of what the model stores."""
    proof_feeds: int = Field(default=2, ge=1)
    """Probe feeds that each firing is proved on: the first, then those of other sizes; the whole graph sees all."""

    def run(self, work: Work) -> Report:
        from layerline.graph.fusion import rewrite_log
        from layerline.graph.io import onnx_files

        case, fused = self._fuse(work)
        rows = _compare(case, fused)
        onnx_files.save(fused.light, work.out)
        rewrite_log.save(work.out, fused)
        for name in COPIED:
            if (work.inputs["model"] / name).is_file():
                shutil.copyfile(work.inputs["model"] / name, work.out / name)
        work.log.say(f"{_nodes(fused.light)} nodes out; {len(fused.proofs)} rewrites proved")
        shipped = _as_users_do(work, case, fused)
        notes = [*case.notes, *fused.notes, *shipped.notes]
        if not all(r.passed for r in rows):
            notes.append(_blame(self._guilty(case, fused)))
        report = _report(case.unfused, fused, rows, notes)
        return dataclasses.replace(report, gates=(*report.gates, *shipped.gates))

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Finds the one rewrite that takes the whole graph beyond its floor; None where there is none.

        Writes the model before and after it to `folder` (`before/model.onnx`, `after/model.onnx`); the row that comes
        back is the first that fails, with the rule and its place in `extra`.
        """
        from layerline.graph.fusion.apply_rules import rewrite
        from layerline.graph.io import onnx_files

        case, fused = self._fuse(work)
        failing = next((r for r in _compare(case, fused) if not r.passed), None)
        firing = self._guilty(case, fused) if failing is not None else None
        if failing is None or firing is None:
            return failing
        limit = [f.site for f in fused.firings].index(firing.site)
        for name, count in (("before", limit), ("after", limit + 1)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            onnx_files.save(
                rewrite(case.unfused, self._rules(), limit=count, **self._options(fused)).light, folder / name
            )
        place = {"rule": firing.site.rule, "place": firing.site.value}
        return dataclasses.replace(failing, extra={**failing.extra, **place})

    def _fuse(self, work: Work) -> tuple[_Case, Fused]:
        from layerline.export import probe_files
        from layerline.graph.fusion.fuse import fuse
        from layerline.graph.io import onnx_files

        rules, folder = self._rules(), work.inputs["model"]
        model, feeds = onnx_files.parts(folder / onnx_files.FILE), probe_files.load(folder)
        work.log.say(f"{_nodes(model)} nodes in; {len(rules)} rules are on")
        floors, notes = _floors(folder, model, feeds)
        chosen = _unlike(feeds, self.proof_feeds)
        fused = fuse(model, chosen, rules=rules, floors=floors, fold_limit=self.fold_limit)
        return _Case(unfused=model, feeds=feeds, floors=floors, notes=notes), fused

    def _guilty(self, case: _Case, fused: Fused) -> Firing | None:
        from layerline.graph.fusion.bisect import guilty

        def good(some: Rewritten) -> bool:
            candidate = dataclasses.replace(fused, light=some.light, firings=some.firings)
            return all(r.passed for r in _compare(case, candidate))

        return guilty(case.unfused, good, self._rules(), **self._options(fused))

    def _rules(self) -> tuple[Rule, ...]:
        from layerline.graph.fusion.apply_rules import select

        return select(self.rules)

    def _options(self, fused: Fused) -> dict[str, Any]:
        return {"denied": frozenset(p.firing.site for p in fused.undone), "fold_limit": self.fold_limit}


def _as_users_do(work: Work, case: _Case, fused: Fused) -> Shipped:
    """The file in a default onnxruntime session, on every feed."""
    from layerline.graph.analysis.rounding_noise import drawn
    from layerline.graph.io import onnx_files
    from layerline.parity import default_session

    outputs = {o.name for o in fused.light.model.graph.output}
    random = outputs & drawn(fused.light.model).keys()
    allowed = default_session.limits(case.floors, outputs)
    return default_session.check(work.out / onnx_files.FILE, case.feeds, allowed=allowed, random=random)


def _floors(folder: Path, model: Light, feeds: Sequence[Feed]) -> tuple[dict[str, float], list[str]]:
    """The noise floor of every value: torch's own, where the model came from torch, else measured here."""
    from layerline.compare import noise_floor
    from layerline.compare.compare_models import floors

    if known := noise_floor.load(folder):
        return known, []
    return floors(model, feeds), [
        "noise floors measured by moving every weight and float input by one rounding step at random"
    ]


def _unlike(feeds: Sequence[Feed], count: int) -> list[Feed]:
    """The first feed, then feeds of sizes not seen yet, then whatever comes: `count` in all."""
    sizes: dict[tuple[object, ...], int] = {}
    for index, feed in enumerate(feeds):
        sizes.setdefault(tuple((k, v.shape) for k, v in sorted(feed.items())), index)
    order = [*sizes.values(), *(i for i in range(len(feeds)) if i not in sizes.values())]
    return [feeds[i] for i in order[:count]]


def _compare(case: _Case, fused: Fused) -> tuple[LayerDiff, ...]:
    """Every value of the unfused model against what holds it in the fused one: itself, or what it was merged with.

    Judged are the outputs and every value whose floor is known; an output without one gets the greatest floor there is.
    Values that depend on a random operator are shown and not judged.
    """
    from layerline.compare.compare_models import compare
    from layerline.graph.analysis.rounding_noise import drawn
    from layerline.graph.fusion.verify_rewrites import reference, tolerance

    unfused = reference(case.unfused, fused.proofs)
    graph, random, highest = unfused.model.graph, drawn(unfused.model), max(case.floors.values(), default=0.0)
    known = dict.fromkeys((o.name for o in graph.output), highest) | dict(case.floors)
    tolerances = {v: tolerance(v, fused.types, known) for v in known if v not in random}
    return compare(
        unfused, fused.light, case.feeds, pairs=_pairs(graph, fused), tolerances=tolerances,
        settled=_quantized(graph) & _quantized(fused.light.model.graph),
    )  # fmt: skip


def _quantized(graph: onnx.GraphProto) -> set[str]:
    """The outputs of QuantizeLinear: rounding may move an element that lies half-way between two steps to the other."""
    return {n.output[0] for n in graph.node if n.op_type == "QuantizeLinear"}


def _pairs(graph: onnx.GraphProto, fused: Fused) -> dict[str, str]:
    """Value of the unfused model to the value of the fused one that holds the same numbers."""
    here = {o for n in fused.light.model.graph.node if n.op_type != "Constant" for o in n.output if o}
    moved = {f.site.value: f.result for f in fused.firings if not f.site.inside and f.result != f.site.value}
    pairs: dict[str, str] = {}
    for name in (o for n in graph.node if n.op_type != "Constant" for o in n.output if o):
        now = name
        while now not in here and now in moved:
            now = moved[now]
        if now in here:
            pairs[name] = now
    return pairs


def _blame(firing: Firing | None) -> str:
    if firing is None:
        return "no single rewrite is to blame for the values beyond their floor"
    rule = firing.site.rule
    return (
        f"rule {rule} at {firing.site.value} takes the graph beyond its floor; `rules: {{{rule}: false}}` leaves it out"
    )


def _report(model: Light, fused: Fused, rows: tuple[LayerDiff, ...], notes: Sequence[str]) -> Report:
    from layerline.graph.analysis.rounding_noise import drawn, unjudged
    from layerline.graph.fusion import rewrite_log

    found = drawn(model.model)
    random = [f"{v} and what follows is drawn at random ({op}): not judged" for v, op in found.items()]
    return Report(
        stage=Fuse.name,
        reference="unfused onnx on onnxruntime",
        candidate="fused onnx on onnxruntime",
        records=rows,
        metrics={
            **unjudged(model.model.graph, found),
            "nodes_before": _nodes(model),
            "nodes_after": _nodes(fused.light),
            "initializer_bytes_before": _bytes(model),
            "initializer_bytes_after": _bytes(fused.light),
            "rewrites": len(fused.proofs),
            "undone": len(fused.undone),
        },
        notes=(*notes, *random[:1], *map(rewrite_log.undone, fused.undone)),
        tables={
            **_cut("rewrites", rewrite_log.fired(fused.proofs)),
            "undone": rewrite_log.fired(fused.undone),
            **_cut("declined", rewrite_log.declined(fused.declines)),
        },
        merged=_merged(fused, rows),
    )


def _merged(fused: Fused, rows: Sequence[LayerDiff]) -> dict[str, str]:
    """What became of the values that have no row: the one with a row that each was merged into, in any number of steps.

    The table of rewrites doesn't tell: it is cut.
    """
    compared = {r.name for r in rows}
    merged: dict[str, str] = {}
    for firing in (p.firing for p in reversed(fused.proofs)):  # where the place is gone too, a later one says where to
        place = firing.site.value
        if holder := place if place in compared else merged.get(place):
            gone = [s for s in firing.sources if s not in compared and s not in merged]
            merged |= dict.fromkeys(gone, holder)
    return merged


def _cut(title: str, rows: list[dict[str, Scalar]]) -> dict[str, list[dict[str, Scalar]]]:
    """A table of at most TABLE_ROWS rows, whose title says so where there are more."""
    if len(rows) <= TABLE_ROWS:
        return {title: rows}
    return {f"{title}, the first {TABLE_ROWS} of {len(rows)} (all: rewrites.json)": rows[:TABLE_ROWS]}


def _nodes(light: Light) -> int:
    from layerline.graph.io import onnx_files

    return sum(len(g.node) for g in onnx_files.graphs(light.model))


def _bytes(light: Light) -> int:
    from layerline.graph.io import onnx_files

    return light.nbytes + sum(len(t.raw_data) or t.ByteSize() for t in onnx_files.tensors(light.model))
