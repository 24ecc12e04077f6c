"""fuse: merges and folds nodes; every rewrite is proved on real inputs and listed."""

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
from layerline.pipeline.report import Gate, LayerDiff, Report, Scalar
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.wording import quantity

if TYPE_CHECKING:
    import onnx_ir as ir

    from layerline.backends.base import Feed
    from layerline.graph.fusion.firing import Firing
    from layerline.graph.fusion.fuse import Rewritten
    from layerline.graph.fusion.rule import FusionRule

COPIED = ("signature.json", "probes.safetensors", "floor.json")
TABLE_ROWS = 200


def _rule_name(name: str) -> str:
    """Refuses the name of an unknown rule, so that the error has its line in pipe.yaml."""
    from layerline.graph.fusion.fuse import select

    try:
        select({name: True})
    except ConfigError as error:
        raise PydanticCustomError("told", "{what}", {"what": error.what, "hint": error.hint}) from None
    return name


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The input: the unfused model, real feeds, and the noise floor of each value."""

    unfused: ir.Model
    feeds: Sequence[Feed]
    floors: Mapping[str, float]
    notes: Sequence[str]


class Fuse(Stage):
    """Folds constants and merges nodes; nothing here changes numbers beyond rounding."""

    name: ClassVar[str] = "fuse"
    version: ClassVar[int] = 12
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
        from layerline.graph.analysis.ir_queries import names
        from layerline.graph.fusion import rewrite_log
        from layerline.graph.io import onnx_files
        from layerline.parity import default_session

        case, fused = self._fuse(work)
        rows = _compare(case, fused)
        # The file that later stages read, and beside it what was rewritten and what declined.
        onnx_files.save(fused.model, work.out)
        rewrite_log.save(work.out, fused)
        # The fused model has the same inputs, and its values the same floors.
        for name in COPIED:
            if (work.inputs["model"] / name).is_file():
                shutil.copyfile(work.inputs["model"] / name, work.out / name)
        work.log.say(f"{quantity(_nodes(fused.model), 'node')} out; {quantity(len(fused.proofs), 'rewrite')} proved")
        outputs = names(fused.model.graph.outputs)
        # Also in a default session, as users open it: its optimisations may meet what the comparison did not.
        allowed = default_session.limits(fused.model, case.floors, outputs)
        gates, session_notes = default_session.check(work.out / onnx_files.FILE, case.feeds, allowed=allowed)
        notes = [*case.notes, *fused.notes, *session_notes]
        if not all(row.passed for row in rows):
            firing = self._guilty(case, fused)
            # Each rewrite was proved by itself; together they may still round more than the floor allows.
            note = "no single rewrite is to blame for the values beyond their floor"
            if firing is not None:
                rule, value = firing.site.rule, firing.site.value
                note = (
                    f"rule {rule} at {value} takes the graph beyond its floor; `rules: {{{rule}: false}}` leaves it out"
                )
            notes.append(note)
        return _report(case.unfused, fused, rows, notes, gates)

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Finds the one rewrite that takes the whole graph beyond its floor.

        Writes the model before and after it to `folder` (`before/model.onnx`, `after/model.onnx`).

        Returns:
            The first row that fails, with the rule and its place in `extra`; None if every row passes.
        """
        from layerline.graph.fusion.fuse import rewrite
        from layerline.graph.io import onnx_files

        case, fused = self._fuse(work)
        failed = [row for row in _compare(case, fused) if not row.passed]
        if not failed:
            return None
        failing = failed[0]
        firing = self._guilty(case, fused)
        if firing is None:
            return failing
        # Rewrites are made in one order, so that a prefix of them is the model before the guilty one.
        limit = [each.site for each in fused.firings].index(firing.site)
        for name, count in (("before", limit), ("after", limit + 1)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            rewritten = rewrite(case.unfused, self._rules(), limit=count, **self._options(fused))
            onnx_files.save(rewritten.model, folder / name)
        place = {"rule": firing.site.rule, "place": firing.site.value}
        return dataclasses.replace(failing, extra={**failing.extra, **place})

    def _fuse(self, work: Work) -> tuple[_Case, Rewritten]:
        from layerline.compare import compare_models, noise_floor
        from layerline.export import probe_files
        from layerline.graph.fusion.fuse import fuse
        from layerline.graph.io import onnx_files

        rules = self._rules()
        folder = work.inputs["model"]
        model = onnx_files.read_model(folder / onnx_files.FILE)
        feeds = probe_files.load(folder)
        work.log.say(f"{_nodes(model)} nodes in; {len(rules)} rules are on")
        notes: list[str] = []
        floors = noise_floor.load(folder)  # torch's own, if the model came from torch
        if not floors:
            # A model that came as ONNX has no torch to compare with.
            floors = compare_models.floors(model, feeds)
            notes = ["noise floors measured by moving every weight and float input by one rounding step at random"]
        chosen = _unlike(feeds, self.proof_feeds)
        fused = fuse(model, chosen, rules=rules, floors=floors, fold_limit=self.fold_limit)
        return _Case(unfused=model, feeds=feeds, floors=floors, notes=notes), fused

    def _guilty(self, case: _Case, fused: Rewritten) -> Firing | None:
        from layerline.graph.fusion.fuse import guilty

        def good(some: Rewritten) -> bool:
            # A prefix of the rewrites: values that it did not move yet are still under their own names.
            candidate = dataclasses.replace(fused, model=some.model, firings=some.firings)
            return all(row.passed for row in _compare(case, candidate))

        return guilty(case.unfused, good, self._rules(), **self._options(fused))

    def _rules(self) -> tuple[FusionRule, ...]:
        from layerline.graph.fusion.fuse import select

        return select(self.rules)

    def _options(self, fused: Rewritten) -> dict[str, Any]:
        return {"denied": frozenset(p.firing.site for p in fused.undone), "fold_limit": self.fold_limit}


def _unlike(feeds: Sequence[Feed], count: int) -> list[Feed]:
    """The first feed, then feeds of sizes that differ from the earlier ones', then the others: `count` in all."""
    by_shapes: dict[tuple[object, ...], int] = {}
    repeated: list[int] = []
    for index, feed in enumerate(feeds):
        shapes = tuple((name, array.shape) for name, array in sorted(feed.items()))
        # A feed of sizes that an earlier one had.
        if by_shapes.setdefault(shapes, index) != index:
            repeated.append(index)
    order = [*by_shapes.values(), *repeated]
    return [feeds[index] for index in order[:count]]


def _compare(case: _Case, fused: Rewritten) -> tuple[LayerDiff, ...]:
    """Compares every value of the unfused model with the value of the fused one that holds the same numbers.

    Outputs and values with a floor are judged; an output without a floor gets the greatest one. Values that depend on a
    random operator are shown and not judged.
    """
    from layerline.compare.compare_models import compare
    from layerline.graph.analysis.ir_queries import first_output, names
    from layerline.graph.analysis.rounding_noise import drawn
    from layerline.graph.fusion.verify_rewrites import reference, tolerance

    unfused = reference(case.unfused, fused.proofs)
    graph = unfused.graph
    random = drawn(unfused)
    # Of QuantizeLinear, rounding may move an element that lies half-way between two steps to the other.
    quantized = {first_output(node) for node in graph if node.op_type == "QuantizeLinear"}
    still_quantized = {first_output(node) for node in fused.model.graph if node.op_type == "QuantizeLinear"}
    # An output that no other node of the program names has no floor of its own.
    highest = max(case.floors.values(), default=0.0)
    floors = dict.fromkeys(names(graph.outputs), highest) | dict(case.floors)
    return compare(
        unfused,
        fused.model,
        case.feeds,
        pairs=_pairs(graph, fused),
        tolerances={value: tolerance(value, fused.types, floors) for value in floors if value not in random},
        settled=quantized & still_quantized,
    )


def _pairs(graph: ir.Graph, fused: Rewritten) -> dict[str, str]:
    """Value of the unfused model to the value of the fused one that holds the same numbers."""
    from layerline.compare.value_pairs import computed_values

    fused_values = set(computed_values(fused.model.graph))
    # A rewrite may put its result under another name; several in a row are followed.
    moved: dict[str, str] = {}
    for firing in fused.firings:
        if not firing.site.inside and firing.result != firing.site.value:
            moved[firing.site.value] = firing.result
    pairs: dict[str, str] = {}
    for name in computed_values(graph):
        holder = name
        while holder not in fused_values and holder in moved:
            holder = moved[holder]
        if holder in fused_values:
            pairs[name] = holder
    return pairs


def _report(
    model: ir.Model, fused: Rewritten, rows: tuple[LayerDiff, ...], notes: Sequence[str], gates: Sequence[Gate]
) -> Report:
    from layerline.graph.analysis.rounding_noise import drawn, random_note, unjudged
    from layerline.graph.fusion import rewrite_log

    random = drawn(model)
    return Report(
        stage=Fuse.name,
        reference="unfused onnx on onnxruntime",
        candidate="fused onnx on onnxruntime",
        records=rows,
        gates=tuple(gates),
        metrics={
            **unjudged(model.graph, random),
            "nodes_before": _nodes(model),
            "nodes_after": _nodes(fused.model),
            "initializer_bytes_before": _bytes(model),
            "initializer_bytes_after": _bytes(fused.model),
            "rewrites": len(fused.proofs),
            "undone": len(fused.undone),
        },
        notes=(*notes, *random_note(random), *map(rewrite_log.undone, fused.undone)),
        tables={
            **_cut("rewrites", rewrite_log.fired(fused.proofs)),
            "undone": rewrite_log.fired(fused.undone),
            **_cut("declined", rewrite_log.declined(fused.declines)),
        },
        merged=_merged(fused, rows),
    )


def _merged(fused: Rewritten, rows: Sequence[LayerDiff]) -> dict[str, str]:
    """For each value without a row, the value with a row that it was merged into, in any number of steps.

    The table of rewrites may be cut, so a reader can't follow the steps there.
    """
    compared = {row.name for row in rows}
    merged: dict[str, str] = {}
    # From the last rewrite back: a value that was merged twice is already mapped to where the later one put it.
    for proof in reversed(fused.proofs):
        firing = proof.firing
        value = firing.site.value
        holder = value if value in compared else merged.get(value)
        for source in firing.sources:
            if holder is not None and source not in compared:
                merged.setdefault(source, holder)
    return merged


def _cut(title: str, rows: list[dict[str, Scalar]]) -> dict[str, list[dict[str, Scalar]]]:
    """A table of at most TABLE_ROWS rows, whose title says so where there are more."""
    if len(rows) <= TABLE_ROWS:
        return {title: rows}
    return {f"{title}, the first {TABLE_ROWS} of {len(rows)} (all: rewrites.json)": rows[:TABLE_ROWS]}


def _nodes(model: ir.Model) -> int:
    from layerline.graph.analysis.ir_queries import model_nodes

    return len(list(model_nodes(model)))


def _bytes(model: ir.Model) -> int:
    from layerline.graph.analysis.ir_queries import stored

    total = 0
    for graph in model.graphs():
        total += sum(tensor.nbytes for _, tensor in stored(graph))
    return total
