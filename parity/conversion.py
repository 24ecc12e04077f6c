"""The ways from the float model to a converted one: half precision, Q/DQ of its own, calibration, repairs, search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.graph.quantization import convert, layer_formats, repairs
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Calibrated, Converted
from layerline.graph.quantization.qdq_placement import Rules
from layerline.graph.quantization.targets import OPS
from layerline.parity import format_search, repair_steps, search_judge
from layerline.parity.accuracy_budget import Evaluation
from layerline.parity.output_sqnr import Bounds
from layerline.parity.repair_steps import Repaired
from layerline.pipeline.config.budgets import MaxDrop
from layerline.pipeline.config.quantize_fields import SEARCH_DROP, QuantizeFields
from layerline.pipeline.report import Report


@dataclass(frozen=True)
class ConversionResult:
    """What every way leaves."""

    converted: Converted  # the converted model beside its reference
    additions: tuple[Callable[[Report], Report], ...] = ()  # what the way adds to the report, one after another


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One conversion."""

    fields: QuantizeFields
    model: ir.Model  # the float model
    data: CalibrationData  # calibration and evaluation samples
    probes: list[Feed]  # inputs on which layers are compared
    evaluation: Evaluation  # measures the task's metric

    def half(self) -> ConversionResult:
        """Half precision wherever it is safe."""
        fields = self.fields
        greatest = convert.greatest_values(self.model, self.data, self.probes)
        unchanged = convert.unchanged(self.model)
        single = self._formats.single
        return ConversionResult(convert.to_half(unchanged, greatest, fields.mode, skip=fields.skip, single=single))

    def own_qdq(self) -> ConversionResult:
        """The model with the Q/DQ that it brings."""
        return ConversionResult(convert.with_own_qdq(self.model, self._rules))

    def quantized(self) -> ConversionResult:
        """Calibrated, with the repairs and the formats that are asked for."""
        fields = self.fields
        calibrated = self.calibrated(self.model)
        if not calibrated.layers() or not (self.repairs or fields.search):
            return ConversionResult(self.finished(calibrated)[1])
        repaired = self.repaired(calibrated)
        if not fields.search:
            return ConversionResult(repaired.converted, (repaired.added_to,))
        # What the budget does not allow in the mode's format is tried in these, the cheapest first.
        others: list[str] = []
        if fields.try_fp8:
            others.append("fp8")
        if "rest" not in fields.model_fields_set:
            others.append(self._formats.half_type or "fp16")
        search = format_search.Search(
            start=repaired,
            make=self.maker(repaired.calibrated),
            judge=search_judge.first_samples_first(
                self.judge, self.evaluation, self.data, self.probes, self.budget, self.bounds
            ),
            float_format=fields.rest,
            others=others,
            log=self.data.work.log.say,
        )
        outcome = search.run()
        # It names the fields of pipe.yaml that keep what was chosen.
        addition = functools.partial(outcome.added_to, model=self.model, layers=fields.layers, try_fp8=fields.try_fp8)
        return ConversionResult(outcome.converted, (addition,))

    def calibrated(self, model: ir.Model) -> Calibrated:
        """Calibrates a float model: the given one, or one whose channels a repair scaled."""
        fields = self.fields
        return convert.calibrate(
            model,
            self.data,
            self._rules,
            calibrator=fields.calibrator,
            percentile=fields.percentile,
            nonfinite=fields.nonfinite,
        )

    def repaired(self, calibrated: Calibrated) -> Repaired:
        """The model with the repairs that gain."""
        if self.fields.repairs and self.data.hook() is None:
            self.data.calibration()  # says that there are no samples
        return repair_steps.run(
            calibrated,
            repairs.in_order(self.repairs),
            repairer=repairs.Repairer(self.calibrated, self.data.fitting),
            finish=self.finished,
            judge=self.judge,
            stop=self.fields.search,
            log=self.data.work.log.say,
        )

    def finished(self, calibrated: Calibrated) -> tuple[Calibrated, Converted]:
        """With its biases corrected, where that is wanted, and the model with all of it quantised."""
        if self.fields.bias_correction or self.fields.search:
            calibrated = calibrated.corrected()
        return calibrated, self.maker(calibrated)((), {})

    def maker(self, calibrated: Calibrated) -> format_search.Make:
        """Makes the model in which further layers stay float, or have other formats than the mode's."""
        fields, formats = self.fields, self._formats
        greatest = functools.cache(lambda: convert.greatest_values(calibrated.model, self.data, self.probes))

        def make(kept: Collection[str], others: Mapping[str, str]) -> Converted:
            fp8 = {layer for layer, name in others.items() if name == "fp8"}
            half = others.keys() - fp8
            reason = f"search: in {fields.format} the budget fails"
            converted = calibrated.converted(dict.fromkeys(set(kept) - fp8, reason), fp8)
            if fields.rest != "fp32":
                return convert.to_half(converted, greatest(), fields.rest, skip=fields.skip, single=formats.single)
            in_half = {*formats.half, *half}
            if in_half:
                return convert.to_half(converted, greatest(), formats.half_type or "fp16", skip=(), only=in_half)
            return converted

        return make

    @property
    def repairs(self) -> Sequence[str]:
        """The repairs that are tried: of a search all that the format has, unless the field is set."""
        fields = self.fields
        if fields.search and "repairs" not in fields.model_fields_set and self.data.hook() is not None:
            return repairs.of_format(fields.format)
        return fields.repairs

    @property
    def budget(self) -> MaxDrop:
        """What the metrics may lose."""
        return self.fields.budget or SEARCH_DROP

    @functools.cached_property
    def judge(self) -> search_judge.JudgeConverted:
        """Judges a model by the budget of the metrics or, without one, by the outputs."""
        return search_judge.judge(self.evaluation, self.data, self.probes, self.budget, self.bounds)

    @property
    def bounds(self) -> Bounds:
        """What every output must have."""
        return Bounds(self.fields.least_db, self.fields.min_cosine)

    @functools.cached_property
    def _formats(self) -> layer_formats.LayerFormats:
        return layer_formats.resolve(self.model, self.fields.layers)

    @functools.cached_property
    def _rules(self) -> Rules:
        fields, formats = self.fields, self._formats
        ops = fields.ops
        if ops is None:
            ops = OPS
        return Rules(
            target=fields.target,
            format=fields.format,
            formats=formats.quantized,
            ops=ops,
            skip=fields.skip,
            per_channel=fields.per_channel,
            attention=fields.attention,
            int4_block=fields.block_size,
            dynamic=fields.dynamic,
            keep=formats.kept,
            forced=formats.quantized,
        )
