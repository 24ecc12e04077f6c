"""Turns what was measured into text. The terminal and the page show the same text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from layerline.pipeline.report import LayerDiff, Measure, Scalar

UNKNOWN = "?"
# Characters of a dimension's name that are shown.
LONGEST = 12
FAILED = "✗"
MEASURES: dict[Measure, str] = {"rel_l2": "rel L2", "max_abs": "max abs", "mean_abs": "mean abs"}

# Placeholders that onnx's shape inference, this package and torch.export write for a size without a name.
_NAMELESS = re.compile(r"#|\bunk__\d+\b|\b[su]\d{2,}\b|\bu\d\b")
_NAME = re.compile(r"[^\W\d][\w.]*(?![\w.(])")
_TRAILING_NUMBER = re.compile(r"[._-]?\d+$")
_LONGEST_CELL = 60

# Measurements that have another name in the tables than in a report.
_HEADINGS = {
    "bytes": "file size",
    "bytes_before": "file size before",
    "bytes_after": "file size after",
    "initializer_bytes": "in initializers",
    "isolated_sqnr_db": "own dB",
    "own_sqnr_db": "own dB",
    "outputs_sqnr_db": "outputs dB",
    "saves_percent": "saves %",
    "cost_saved_percent": "cost saved %",
    "low_95": "95 % low",
    "high_95": "95 % high",
    "weight_sqnr_db": "weight dB",
    "rounding_sqnr_db": "rounding dB",
    "clipped_there": "clipped there %",
    "clipped": "clipped %",
    "network_layer": "engine layer",
}


def figure(value: Scalar) -> str:
    """Formats any scalar; None, which was not measured, is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if isinstance(value, float):
        return _nonfinite(value) or f"{value:.4g}"
    return str(value)


def number(value: Any) -> float | None:
    """The value as a float; None where it is no number. "inf", "-inf" and "nan" travel as text."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    return None


def is_size(name: str) -> bool:
    """Whether a measurement counts bytes."""
    return "bytes" in name.split("_")


def amount(name: str, value: Scalar) -> str:
    """Formats the value of a measurement; bytes in the largest unit that leaves a whole number."""
    if not is_size(name) or not isinstance(value, int | float) or isinstance(value, bool):
        return figure(value)
    size = float(value)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:  # from here on three digits would round to 1000
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio in dB; infinity means that both sides are equal."""
    if value is None:
        return ""
    if value == math.inf:
        return "equal"
    # Adding 0.0 turns -0.0 into 0.0.
    return _nonfinite(value) or f"{round(value, 1) + 0.0:.1f}"


def error(value: float | None) -> str:
    """An error of any magnitude, to three digits."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return _nonfinite(value) or f"{value:#.3g}".rstrip(".")


def similarity(value: float | None) -> str:
    """A cosine to six places, truncated instead of rounded, so that only 1 reads 1."""
    if value is None:
        return ""
    return _nonfinite(value) or f"{math.trunc(value * 1e6) / 1e6:.6f}"


def percent(share: float | None) -> str:
    """A share of 1 in per cent, to two places; a smaller share keeps one digit, down to a millionth."""
    if share is None:
        return ""
    # Shares between two bins of a histogram are interpolated: less than an element is none.
    if share < 5e-7:
        return "0"
    if share < 0.0001:
        return f"{100 * share:.1g}"
    return _nonfinite(share) or f"{100 * share:.2f}"


def outcome(passed: bool) -> str:
    """A verdict in words: colour alone says nothing in print or to a colour-blind reader."""
    if passed:
        return "passed"
    return f"{FAILED} failed"


def verdict(record: LayerDiff) -> str:
    """Whether a value passed; empty where it has no tolerance."""
    if record.passed and record.tolerance is None:
        return ""
    return outcome(record.passed)


def heading(key: str) -> str:
    """The key of a measurement as words: `isolated_sqnr_db` reads `own dB`, `engine_bytes` reads `engine size`."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    spelled = key.replace("sqnr_db", "SQNR dB").replace("samples_s", "samples/s")
    return re.sub(r"\bbytes\b", "size", re.sub(r"_db\b", " dB", spelled).replace("_", " "))


def count(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    if number != 1:
        noun += "s"
    return f"{number} {noun}"


def short(value: Any) -> str:
    """Text of any length on one line: hashes as their beginning."""
    # A list of hashes stays as it is: only a text that is one hash is shortened.
    text = hashed(value)
    if len(text) <= _LONGEST_CELL:
        return text
    return f"{text[: _LONGEST_CELL - 1]}…"


def hashed(value: Any) -> str:
    """The value as text, shortened to 12 characters where it is a SHA-256; empty for None."""
    if value is None:
        return ""
    text = str(value)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    return text


def _nonfinite(value: float) -> str:
    """`NaN`, `inf` or `-inf`; empty for every finite number."""
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value):
        return ""
    return str(value)


def shape(dims: Sequence[int | str]) -> str:
    """`batch×16×(h//2 + 1)`."""
    return "×".join(map(_size, dims))


def _size(dim: int | str) -> str:
    """A number, or a symbolic dimension: a name or an expression over names."""
    text = str(dim)
    if not text or _NAMELESS.search(text):
        return UNKNOWN
    shortened = _NAME.sub(lambda name: brief(name[0]), text)
    # The dimensions are joined by a times sign, so sums need parentheses.
    if " + " in text or " - " in text:
        return f"({shortened})"
    return shortened


def brief(name: str) -> str:
    """Shortens a name to its last dotted part, then cuts it in the middle; a number at its end stays."""
    if len(name) <= LONGEST:
        return name
    parts = name.split(".")
    # A number alone names nothing.
    last = parts[-2:] if parts[-1].isdigit() else parts[-1:]
    short_name = ".".join(last)
    if len(short_name) <= LONGEST:
        return short_name
    number = _TRAILING_NUMBER.search(short_name)
    if number:
        tail = number[0][-LONGEST // 2 :]
    else:
        tail = short_name[-LONGEST // 2 + 1 :]
    return f"{short_name[: LONGEST - 1 - len(tail)]}…{tail}"
