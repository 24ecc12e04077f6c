"""What the columns of the tables mean, in one place: the page shows it, and docs/cli.md repeats it."""

from __future__ import annotations

from dataclasses import dataclass

from layerline.views.grid import Column, View


@dataclass(frozen=True)
class Term:
    """A column: its heading in `pipe diff`, on the page where that is another one, the unit, what it says."""

    name: str
    page: str
    unit: str
    meaning: str


# a is the reference and b the candidate: what the first line of a table names.
TERMS = (
    Term("layer", "", "", "module path in the model; of a layer that fuse merged all of them"),
    Term("value", "", "", "the tensor, by the name it keeps in every stage"),
    Term("SQNR dB", "", "dB", "10 log10(‖a‖² / ‖a - b‖²): 20 dB more is a tenth of the error; `equal`: no difference"),
    Term("rel L2", "relative L2", "none", "‖a - b‖ / ‖a‖: 0.01 is 40 dB"),
    Term("max abs", "max |a-b|, mean |a-b|", "the value's", "greatest difference of two elements; the mean one"),
    Term("cosine", "", "-1 to 1", "cosine of the angle between a and b; cut off, so that only what is 1 reads 1"),
    Term("own dB", "isolated SQNR dB", "dB", "the layer's own error: SQNR where it is fed what a computes before it"),
    Term("weight dB", "weight SQNR dB", "dB", "SQNR of the weights behind this value, float against quantised"),
    Term("clipped %", "", "per cent", "elements of the calibration data that lie beyond the range"),
    Term("floor", "", "relative L2", "torch's own float32 error against float64, measured on this value"),
    Term("ratio", "", "none", "error over floor (5e-07 at least): up to 8 passes; with `rtol` and `atol` up to 1"),
    Term("source", "", "", "file and line of forward() that computes it"),
    Term("flips", "", "elements", "thresholds that fell on the other side, within the noise of what is compared"),
    Term("masked", "", "elements", "hidden by a mask (-1e9, the lowest float) on both sides: in none of the measures"),
    Term("nondeterministic", "", "", "the random operator that it depends on: it is compared with nothing"),
    Term("cause", "", "", "the jump further up (a threshold, an ArgMax) that explains the difference"),
    Term("update ratio", "", "none", "length of the last update over that of the weight"),
    Term("dead", "", "", "a trained parameter that never changed"),
    Term(
        "engine layer",
        "network layer",
        "",
        "TensorRT's name of it; then its `type`, and the `precision` it computes in",
    ),
    Term("", "verdict", "", "`ok` or `passed`: within the tolerance; empty where nothing is asked"),
    Term("", "tolerance", "as judged", "greatest value of the measure in `judged by` that passes"),
    Term("", "NaN/Inf a, NaN/Inf b", "elements", "not finite in a, in b; `one side only`: in one of them, which fails"),
    Term("", "merged into", "", "the value or module that holds it since fuse"),
    Term("", "order", "", "its place in the network"),
)


def markdown() -> str:
    """The table of the docs."""
    rows = [f"| {_code(t.name)} | {_code(t.page)} | {t.unit} | {_cell(t.meaning)} |" for t in TERMS]
    head = ["| `pipe diff` | the page, where it differs | unit | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def view() -> View:
    """The table of the page."""
    columns = (Column("column"), Column("unit"), Column("meaning"))
    return View("", columns, [[t.page or t.name, t.unit, t.meaning.replace("`", "")] for t in TERMS])


def _code(names: str) -> str:
    return ", ".join(f"`{_cell(name)}`" for name in names.split(", ")) if names else ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
