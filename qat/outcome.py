"""What the report of quantize says of a training: the float, the calibrated and the trained model side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from layerline.backends.base import Feed
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.convert import Converted
from layerline.parity import output_sqnr, quantization_report
from layerline.parity.accuracy_budget import Measured
from layerline.pipeline.report import OWN, Report, Scalar
from layerline.qat.training import Trained

_WORST = 5  # layers of each model
Row = dict[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class QatOutcome:
    """A training with fake quantisation, and what it started from.

    Attributes:
        trained: what training left.
        before: the model by calibration alone.
        after: the trained one.
        measured: the metric of the model by calibration alone; None where there is none.
        data: samples on which outputs are compared.
        probes: inputs on which layers are compared.
    """

    trained: Trained
    before: Converted
    after: Converted
    measured: Measured | None
    data: CalibrationData
    probes: Sequence[Feed]

    def added_to(self, report: Report) -> Report:
        """The report with the gates, notes and figures of the training, and two tables.

        "float, PTQ, QAT" has a row for each metric, and for the SQNR of each output; "worst layers" those that lose
        most in either model.
        """
        calibrated = quantization_report.layer_report(report.stage, self.before, self.probes, mode="int8")
        worst = [*_worst("PTQ", calibrated), *_worst("QAT", report)]
        rows = self._rows(report)
        return dataclasses.replace(
            report,
            reference=f"trained {report.reference}",
            metrics={**report.metrics, **self.trained.metrics},
            gates=(*self.trained.gates, *report.gates),
            notes=(*(_sentence(row) for row in rows), *self.trained.notes, *report.notes),
            tables={"float, PTQ, QAT": rows, "worst layers": worst, **report.tables},
        )

    def _rows(self, report: Report) -> list[Row]:
        rows: list[Row] = []
        if self.measured is not None:
            for name, before in self.measured.after.items():
                rows.append(
                    {"figure": name, "float": self.measured.before[name], "PTQ": before, "QAT": report.metrics[name]}
                )
        feeds = output_sqnr.samples(self.data, self.probes)
        outputs = [output_sqnr.outputs(c.reference, c.measured, feeds) for c in (self.before, self.after)]
        for name in [n for n in outputs[0] if n in outputs[1]]:
            before_db, after_db = (output[name].sqnr_db for output in outputs)
            rows.append({"figure": f"SQNR of {name}, dB", "float": None, "PTQ": before_db, "QAT": after_db})
        return rows


def _sentence(row: Row) -> str:
    figures = [f"{name} {row[name]:.4g}" for name in ("float", "PTQ", "QAT") if row[name] is not None]
    return f"{row['figure']}: {', '.join(figures)}"


def _worst(model: str, report: Report) -> list[Row]:
    rows: list[Row] = []
    for record in report.sorted(report.order)[:_WORST]:
        own = record.extra.get(OWN)
        rows.append(
            {"model": model, "layer": record.where, "value": record.name, "own_sqnr_db": own, "sqnr_db": record.sqnr_db}
        )
    return rows
