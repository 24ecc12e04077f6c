"""What the report of quantize says of a training: the float, the calibrated and the trained model side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerline.backends.base import Feed
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.parity import output_sqnr, quantization_report
from layerline.parity.accuracy_budget import MetricPair
from layerline.pipeline.report import OWN, Report, Row
from layerline.qat.training import Trained

PTQ, REPAIRED, QAT = "PTQ", "PTQ with repairs", "QAT"
_WORST = 5  # layers of each model


@dataclass(frozen=True, kw_only=True)
class QatOutcome:
    """A training with fake quantisation, and what it started from.

    Attributes:
        models: by calibration alone, with repairs where some were kept, and trained; by their names in the tables.
        measured: the metric of each of them; None where there is none.
        result: the name of the one that is the artifact.
        note: why the training was left out; empty where it was not.
        data: samples on which outputs are compared.
        probes: inputs on which layers are compared.
    """

    trained: Trained
    models: Mapping[str, Converted]
    measured: Mapping[str, MetricPair | None]
    result: str
    note: str
    data: CalibrationData
    probes: Sequence[Feed]

    def added_to(self, report: Report) -> Report:
        """The report with the gates, notes and figures of the training, and two tables.

        "float, PTQ, QAT" has a row for each metric, and for the SQNR of each output; "worst layers" those that lose
        most in each model.
        """
        worst: list[Row] = []
        for name, converted in self.models.items():
            layers = report
            if name != self.result:  # the report is about the result already
                same_weights = dataclasses.replace(converted, reference=converted.trained or converted.reference)
                layers = quantization_report.layer_report(report.stage, same_weights, self.probes, mode="int8")
            worst += _worst(name, layers)
        rows = self._rows()
        reference = report.reference
        if self.result == QAT:
            reference = f"trained {reference}"
        notes = [_sentence(row) for row in rows]
        if self.note:
            notes.insert(0, self.note)
        return dataclasses.replace(
            report,
            reference=reference,
            metrics={**report.metrics, **self.trained.metrics},
            gates=(*self.trained.gates, *report.gates),
            notes=(*notes, *self.trained.notes, *report.notes),
            tables={"float, PTQ, QAT": rows, "worst layers": worst, **report.tables},
        )

    def _rows(self) -> list[Row]:
        rows: dict[str, Row] = {}
        for model, measured in self.measured.items():
            if measured is not None:
                for name, value in measured.after.items():
                    rows.setdefault(name, {"figure": name, "float": measured.before[name]})[model] = value
        feeds = output_sqnr.samples(self.data, self.probes)
        for model, converted in self.models.items():
            for name, output in output_sqnr.outputs(converted.reference, converted.measured, feeds).items():
                figure = f"SQNR of {name}, dB"
                rows.setdefault(figure, {"figure": figure, "float": None})[model] = output.sqnr_db
        return [row for row in rows.values() if set(self.models) <= set(row)]


def _sentence(row: Row) -> str:
    figures = [f"{name} {value:.4g}" for name, value in row.items() if name != "figure" and value is not None]
    return f"{row['figure']}: {', '.join(figures)}"


def _worst(model: str, report: Report) -> list[Row]:
    rows: list[Row] = []
    for record in report.sorted(report.order)[:_WORST]:
        own = record.extra.get(OWN)
        rows.append(
            {"model": model, "layer": record.where, "value": record.name, "own_sqnr_db": own, "sqnr_db": record.sqnr_db}
        )
    return rows
