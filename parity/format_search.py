"""Finds the cheapest formats of layers that keep a budget: quantised where it holds, half or float32 elsewhere.

1. Everything quantised, as it is and then with repairs (`repair_steps`). If the budget holds, that is the result.
2. The layers are ranked by the error that each alone adds to the outputs (`output_effects`), per byte that it saves.
3. Bisection over the ranking: how many of its first layers have to stay float. Where the outputs' SQNR judges, it
   begins at the number that the layers' effects predict.
4. Quantised again in groups, those of least error first, as long as the budget holds. On few samples a verdict is
   noisy: a layer that fails alone stays float, and the others are still tried. Where the outputs' SQNR judges, groups
   that would add far more error than it leaves are not evaluated.
5. What stays float becomes half precision, if that is cheaper and the budget still holds: all of it, else in groups.

Every assignment that counts was evaluated on the budget itself. The ranking only says what is tried first.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from layerline.calib.plan import readers_of
from layerline.compare.compare_models import distances
from layerline.compare.output_effects import effects
from layerline.graph.analysis.ir_queries import first_output
from layerline.graph.quantization import measured_plan
from layerline.graph.quantization.convert import Converted
from layerline.graph.quantization.cost_model import CostModel
from layerline.graph.quantization.naming import matching, module_of
from layerline.graph.quantization.targets import FORMATS, OPS
from layerline.parity.repair_steps import Repaired
from layerline.parity.search_judge import JudgeConverted, Verdict
from layerline.pipeline.report import Gate, Report, Scalar, decibels

# No further group of layers is tried after so many; each of `Search.others` has at least one.
MOST_EVALUATIONS = 40
# Part of its own bytes that a format saves at least for a layer's rank: layers that save nothing come first.
LEAST_SAVING = 0.01


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The assignment that the search ended with."""

    converted: Converted  # the model
    formats: Mapping[str, str]  # format of each layer that was quantised at first
    quantized: Mapping[str, str]  # the format that it had then
    rows: Sequence[Mapping[str, Scalar]]  # the table: one row a layer
    evaluations: int  # how many assignments were evaluated on the budget
    saved: float  # part of the float model's bytes that the assignment saves, from 0 to 1
    repaired: Repaired  # the model that the search began with
    gates: tuple[Gate, ...] = ()  # a failed one where the budget holds with no assignment

    def added_to(self, report: Report, model: ir.Model, layers: Mapping[str, str], *, try_fp8: bool) -> Report:
        """The report with the table, its figures, and the fields of pipe.yaml that make the same model or formats.

        Args:
            model: the float model.
            layers: `quantize.layers` as pipe.yaml has it.
            try_fp8: `quantize.try_fp8` of the search.
        """
        note = f"full evaluations of the budget: {self.evaluations}"
        fields: dict[str, str] = {}
        start = self.repaired.calibrated
        if start.shifts:
            fields["bias_correction"] = "true"
        if start.repairs:
            fields["repairs"] = f"[{', '.join(start.repairs)}]"
        patterns = fragment(model, layers, self.formats, self.quantized)
        if patterns:
            fields["layers"] = json.dumps(patterns, ensure_ascii=False)
        written = ", ".join(f"{name}: {value}" for name, value in fields.items())
        keep = "; to keep this choice for `pipe run all`, write in pipe.yaml"
        if patterns:
            # Without a search the ranges, repairs and biases are chosen with these layers float. The search chose them
            # with every layer quantised, and judged that model.
            same = "search: true, try_fp8: true" if try_fp8 else "search: true"
            note += f"{keep}, beside the budget: `quantize: {{{same}}}`; formats alone, with ranges and repairs chosen "
            note += f"anew, so that the budget may fail: `quantize: {{{written}}}`"
        elif fields:
            note += f"{keep}: `quantize: {{{written}}}`"
        else:
            note += "; `pipe run all` makes the same choice, and pipe.yaml needs no change"
        counts = Counter(self.formats.values())
        metrics: dict[str, Scalar] = {
            "evaluations": self.evaluations,
            "formats": ", ".join(f"{count} {name}" for name, count in counts.items()),
            "cost_saved_percent": 100 * self.saved,
        }
        report = dataclasses.replace(
            report,
            metrics={**report.metrics, **metrics},
            gates=(*self.gates, *report.gates),
            notes=(note, *report.notes),
            tables={"search": self.rows, **report.tables},
        )
        return self.repaired.added_to(report)


FAR_BEYOND = 3.0
"""How much more error than there is room for rules layers out unmeasured. Errors of layers add up but roughly: they
are correlated, and some pass through a layer that was quantised when they were measured and is float now."""

Make = Callable[[Collection[str], Mapping[str, str]], Converted]


@dataclass(kw_only=True)
class Search:
    """One search."""

    start: Repaired  # the model in which every layer is quantised, what it was made from, and its verdict
    # The model in which these layers are not quantised as the mode says, and have the formats of the second argument,
    # or else stay float.
    make: Make
    judge: JudgeConverted  # evaluates a model on the budget
    float_format: str  # what stays float: "fp32", or a half type
    others: Sequence[str]  # formats that are tried for what stays float, the cheapest first: fp8, a half type
    log: Callable[[str], None]  # called with one line for each evaluation
    _verdicts: dict[frozenset[str], Verdict] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _chosen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept: frozenset[str] = frozenset()
        self.calibrated = self.start.calibrated
        self._evaluations = self.start.evaluations
        self._verdicts[kept] = self.start.verdict
        self._best = self.start.verdict, kept, self.start.converted

    def run(self) -> SearchOutcome:
        """Searches; the outcome has a failed gate where no layer could be quantised."""
        self._quantized = self.calibrated.layers()
        self._layers = list(self._quantized)
        self._measure(self.start.converted)
        self._savings = {layer: self._saving(layer) for layer in self._layers}
        self._layers = self._ranked()
        kept: frozenset[str] = frozenset()
        if not self.start.verdict.passed:
            kept = self._quantized_again(frozenset(self._layers[: self._fewest()]))
            if len(kept) == len(self._layers):
                return self._impossible()
        return self._outcome(kept, self._best[2])

    def _measure(self, quantized: Converted) -> None:
        """Measures each layer's own error and its effect at the outputs, and the size of every value."""
        # The table and the order of the trials need no more samples than the trials of single ranges.
        feeds = measured_plan.spread(self.calibrated.feeds)
        values = distances(quantized.reference, quantized.measured, feeds)
        elements = {name: whole.count for name, (whole, _) in values.items()}
        for feed in feeds:
            for name, array in feed.items():
                elements[name] = elements.get(name, 0) + array.size
        self._costs = CostModel(self.calibrated.model, elements)
        noise = {name: own.ee / own.aa for name, (_, own) in values.items() if own.aa}
        self._own = {layer: noise[layer] for layer in self._layers if layer in noise}
        worst_first = sorted(self._own, key=lambda layer: -self._own[layer])
        self._effects = effects(quantized.reference, quantized.measured, feeds, worst_first)

    def _holds(self, kept: frozenset[str]) -> bool:
        """Whether the budget holds if these layers stay float; evaluated once for each set."""
        if kept not in self._verdicts:
            what = f"{len(kept)} of {len(self._layers)} layers float"
            self._verdicts[kept] = self._evaluate(self.make(kept, {}), kept, what)
        return self._verdicts[kept].passed

    def _evaluate(self, converted: Converted, kept: frozenset[str], what: str) -> Verdict:
        verdict = self.judge(converted)
        self._evaluations += 1
        self.log(f"{what}: {verdict.seen}")
        best = self._best
        # Of assignments that hold the last one counts: the search goes from more expensive ones to cheaper ones.
        if verdict.passed or (not best[0].passed and verdict.lack < best[0].lack):
            self._best = verdict, kept, converted
        return verdict

    def _saving(self, layer: str) -> float:
        """Bytes that the layer's format saves where all others are quantised."""
        one_float = self._costs.cost({**self._quantized, layer: self.float_format}, self.float_format)
        return one_float - self._costs.cost(self._quantized, self.float_format)

    def _names(self) -> str:
        """The formats of the layers where all are quantised."""
        return " or ".join(dict.fromkeys(self._quantized.values()))

    def _ranked(self) -> list[str]:
        """The layers, those first that add most error for what they save."""
        greatest = max((abs(saving) for saving in self._savings.values()), default=0.0) or 1.0
        scores: dict[str, float] = {}
        for layer in self._layers:
            # What the effect was not measured of is ranked by its own error.
            share = self._effects.get(layer, self._own.get(layer, math.inf))
            scores[layer] = share / max(self._savings[layer], LEAST_SAVING * greatest)
        return sorted(self._layers, key=lambda layer: -scores[layer])

    def _fewest(self) -> int:
        """How many of the first layers have to stay float: all of them if the budget fails with the last one alone.

        Goes on in doubling steps until the budget holds, then halves the interval. All layers in float hold unmeasured.
        """
        most = len(self._layers)
        failing, holding, step = 0, self._predicted(), 1
        while holding < most and not self._holds(frozenset(self._layers[:holding])):
            failing, holding, step = holding, holding + step, 2 * step
        holding = min(holding, most)
        while holding - failing > 1:
            middle = (failing + holding) // 2
            if self._holds(frozenset(self._layers[:middle])):
                holding = middle
            else:
                failing = middle
        return holding

    def _predicted(self) -> int:
        """How many of the first layers have to stay float if the errors of the others add up; 1 where unknown."""
        whole, whole_noise = sum(self._effects.values()), self.start.verdict.noise
        if whole_noise is None or not 0 < whole < math.inf:
            return 1
        left = whole
        for count, layer in enumerate(self._layers, 1):
            left -= self._effects.get(layer, 0.0)
            # Effects are measured on other samples than the verdict, see `_excess`.
            if whole_noise * left <= whole:
                return count
        return len(self._layers)

    def _quantized_again(self, kept: frozenset[str]) -> frozenset[str]:
        """Tries to quantise layers again, in groups that are halved where the budget fails."""

        def accepts(group: list[str]) -> bool:
            nonlocal kept
            fewer = kept - frozenset(group)
            excess = self._excess(group, self._verdicts.get(kept))
            if excess > FAR_BEYOND:
                if len(group) == 1:
                    format_name = self._quantized[group[0]]
                    self._reasons[group[0]] = f"{format_name} would add {excess:.3g} times the error that is left to it"
                return False
            if self._holds(fewer):
                kept = fewer
                return True
            if len(group) == 1:
                self._reasons[group[0]] = self._failing(group[0], self._verdicts[fewer])
            return False

        # The bisection ended at this layer. In a group it would make the others fail, too.
        last = self._layers[len(kept) - 1]
        accepts([last])
        self._offer(kept - {last}, accepts, MOST_EVALUATIONS)
        return kept

    def _excess(self, group: Sequence[str], verdict: Verdict | None) -> float:
        """The error that quantising layers is expected to add, relative to what the budget leaves; 0 where unknown."""
        whole, whole_noise = sum(self._effects.values()), self.start.verdict.noise
        if verdict is None or verdict.noise is None or whole_noise is None or not whole > 0:
            return 0.0
        # Effects are measured on other samples than the verdict: scaled so that all layers together add what they did.
        added = whole_noise * sum(self._effects.get(layer, 0.0) for layer in group) / whole
        return added / max(1 - verdict.noise, 1e-9)

    def _offer(self, layers: frozenset[str], accepts: Callable[[list[str]], bool], limit: int) -> None:
        """Offers layers as one group; a group that is not accepted is offered in halves, that of least error first.

        Args:
            limit: how many evaluations end it.
        """
        groups = [[layer for layer in reversed(self._layers) if layer in layers]]
        while any(groups) and self._evaluations < limit:
            group = groups.pop(0)
            if not accepts(group) and len(group) > 1:
                middle = len(group) // 2
                groups = [group[:middle], group[middle:], *groups]

    def _outcome(self, kept: frozenset[str], converted: Converted) -> SearchOutcome:
        for name in self.others:
            converted = self._in_format(kept, name, converted)
        # Half precision has its own reasons to leave a layer in float32, such as its range; fp8 has no form of a pool.
        reasons = Counter(item.name for item in converted.plan.kept)
        quantized = readers_of(converted.plan.values)
        formats = self._formats(kept)
        for layer, name in self._chosen.items():
            has_form = reasons[layer] < 2
            if name in FORMATS:
                has_form = layer in quantized
            if has_form:
                formats[layer] = name
        return self._result(converted, formats, ())

    def _in_format(self, kept: frozenset[str], name: str, converted: Converted) -> Converted:
        """Tries a cheaper format for what is float so far: for all of it, else in groups."""
        formats = {**self._formats(kept), **self._chosen}
        left = kept - self._chosen.keys()
        if not left or self._costs.cost({**formats, **dict.fromkeys(left, name)}) >= self._costs.cost(formats):
            return converted

        failed: list[dict[str, str]] = []

        def accepts(group: list[str]) -> bool:
            nonlocal converted
            tried = {**self._chosen, **dict.fromkeys(group, name)}
            # Where one half of a group was accepted, the other half completes the group that failed.
            if tried in failed:
                return False
            candidate = self.make(kept, tried)
            count = list(tried.values()).count(name)
            passed = self._evaluate(candidate, kept, f"{count} of these {len(kept)} in {name}").passed
            if passed:
                self._chosen, converted = tried, candidate
            else:
                failed.append(tried)
            return passed

        self._offer(left, accepts, max(MOST_EVALUATIONS, self._evaluations + 1))
        return converted

    def _formats(self, kept: frozenset[str]) -> dict[str, str]:
        return {**self._quantized, **dict.fromkeys(kept, self.float_format)}

    def _impossible(self) -> SearchOutcome:
        verdict, kept, converted = self._best
        count = len(self._layers) - len(kept)
        reached = f"the best reached is {verdict.seen}, with {count} of {len(self._layers)} layers in {self._names()}"
        hint = "allow more with quantize.max_drop or min_db, or use mode: fp16"
        gate = Gate("search", False, reached, f"the budget kept with at least one layer in {self._names()}", hint)
        return self._result(converted, self._formats(kept), (gate,))

    def _result(self, converted: Converted, formats: Mapping[str, str], gates: tuple[Gate, ...]) -> SearchOutcome:
        in_float = self._costs.cost({}, self.float_format) or 1.0
        nodes = {first_output(node): node for node in self.calibrated.model.graph}
        rows: list[Mapping[str, Scalar]] = []
        for layer in self._layers:
            own, effect = self._own.get(layer), self._effects.get(layer)
            rows.append(
                {
                    "layer": module_of(nodes[layer]),
                    "value": layer,
                    "op": nodes[layer].op_type,
                    "own_sqnr_db": None if own is None else decibels(1.0, own),
                    "outputs_sqnr_db": None if effect is None else decibels(1.0, effect),
                    "saves_percent": 100 * self._savings[layer] / in_float,
                    "format": formats[layer],
                    "why": self._why(layer, formats[layer], failed=bool(gates)),
                }
            )
        for name, reason in self.calibrated.rules.keep.items():
            if name in nodes and nodes[name].op_type in OPS:
                place: dict[str, Scalar] = {"layer": module_of(nodes[name]), "value": name, "op": nodes[name].op_type}
                rows.append({**place, "format": "float", "why": reason})
        return SearchOutcome(
            converted=converted,
            formats=formats,
            quantized=self._quantized,
            rows=rows,
            evaluations=self._evaluations,
            saved=1 - self._costs.cost(formats, self.float_format) / in_float,
            repaired=self.start,
            gates=gates,
        )

    def _why(self, layer: str, chosen: str, *, failed: bool) -> str:
        if failed:
            return "of the assignment that came nearest to the budget"
        quantized = self._quantized[layer]
        if chosen == quantized:
            if self._savings[layer] <= 0:
                return f"the budget holds with it in {quantized}, but Q/DQ costs as much as that saves, or more"
            return f"the budget holds with it in {quantized}"
        return self._reasons.get(layer, f"not tried in {quantized} again after {self._evaluations} evaluations")

    def _failing(self, layer: str, verdict: Verdict) -> str:
        return f"in {self._quantized[layer]} the budget fails: {verdict.seen}"


def fragment(
    model: ir.Model, layers: Mapping[str, str], formats: Mapping[str, str], quantized: Mapping[str, str]
) -> dict[str, str]:
    """`quantize.layers` that fixes what a search chose.

    Args:
        model: the float model.
        layers: what pipe.yaml has already.
        formats: by the layer's first output.
        quantized: the same of the model that the search began with.
    """
    quantizable = [node for node in model.graph if node.op_type in OPS]
    patterns = dict(layers)
    for node in quantizable:
        chosen = formats.get(first_output(node), "")
        # What is quantised has its format by the mode, or by a pattern that pipe.yaml has already.
        if chosen and chosen != quantized.get(first_output(node)):
            patterns[_pattern(model, node, quantizable)] = chosen
    return patterns


def _pattern(model: ir.Model, node: ir.Node, quantizable: Collection[ir.Node]) -> str:
    """The module path of a layer, if that means no other layer; else the name of its value."""
    module = glob.escape(module_of(node))
    if module and matching(model, [module], field="quantize.layers", reads=False) & set(quantizable) == {node}:
        return module
    return glob.escape(first_output(node))
