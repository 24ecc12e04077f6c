"""The meaning of every column of the tables. The page of `pipe report` shows it, and docs/cli.md repeats it."""

from __future__ import annotations

from dataclasses import dataclass

from layerline.views.tables import Column, TableView


@dataclass(frozen=True)
class Term:
    """A column: its heading, its unit, and what it says."""

    name: str
    unit: str
    meaning: str


# a is the reference and b the candidate; the first line of a table names both.
TERMS = (
    Term("layer", "", "module path in the model; for a layer that fuse merged, all the paths"),
    Term("value", "", "name of the tensor, the same in every stage"),
    Term("SQNR dB", "dB", "10 log10(‖a‖² / ‖a - b‖²). 20 dB more is a tenth of the error. `equal`: no difference"),
    Term("rel L2", "none", "‖a - b‖ / ‖a‖; 0.01 is 40 dB"),
    Term("max abs, mean abs", "the value's", "greatest difference of two elements; the mean difference"),
    Term("cosine", "-1 to 1", "cosine of the angle between a and b, truncated so that only 1 reads 1"),
    Term("own dB", "dB", "the layer's own error: SQNR when the layer gets a's inputs"),
    Term("weight dB", "dB", "SQNR of the layer's weights, float against quantised"),
    Term("rounding dB", "dB", "the own dB that follows from rounding the layer's inputs and weights as the plan says"),
    Term("clipped %", "per cent", "calibration elements outside the quantisation range"),
    Term("clipped there %", "per cent", "the same of a few samples of eval_data()"),
    Term("floor", "relative L2", "torch's float32 error against float64, measured on this value"),
    Term("ratio", "none", "error / floor (at least 5e-07). Up to 8 passes; with `rtol` and `atol`, up to 1"),
    Term("source", "", "file and line of forward() that computes the value"),
    Term("flips", "elements", "elements on the other side of a threshold, within noise"),
    Term("masked", "elements", "elements hidden by a mask (-1e9, the lowest float) on both sides; not compared"),
    Term("nondeterministic", "", "the random operator that the value depends on; the value is not compared"),
    Term("cause", "", "the earlier threshold or ArgMax that explains the difference"),
    Term("outputs dB", "dB", "SQNR of the outputs if only this layer were converted, measured on a few samples"),
    Term(
        "gain dB",
        "dB",
        "by how much the outputs gain if only this layer stays float, all others converted; exact: no error is left",
    ),
    Term(
        "saves %",
        "per cent",
        "of `pipe tune`: what the format of this layer saves with all others quantised, of the cost of the float model",
    ),
    Term("95 % low, 95 % high", "the metric's", "interval of the change; `by` names the method that gives it"),
    Term("update ratio", "none", "norm of the last update / norm of the weight"),
    Term("dead", "", "a trained parameter that never changed"),
    Term("engine layer", "", "TensorRT's name of the layer; then its `type` and `precision`"),
    Term("verdict", "", "`passed`: within the tolerance. Empty: no tolerance"),
    Term("tolerance", "as judged", "limit for the measure in `judged by`"),
    Term("NaN/Inf a, NaN/Inf b", "elements", "not finite in a, in b. `one side only`: in one of them, which fails"),
    Term("merged into", "", "the value or module that fuse merged it into"),
    Term("order", "", "position in the network"),
)


def view() -> TableView:
    """The table of the page."""
    columns = (Column("column"), Column("unit"), Column("meaning"))
    rows = [[term.name, term.unit, term.meaning.replace("`", "")] for term in TERMS]
    return TableView("", columns, rows)
