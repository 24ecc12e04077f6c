"""What a picture's labels take: where each begins and ends, by the widths that a browser draws letters in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

LETTER, WIDE = 6.6, 10.4  # user units at the size of page.css, of a wide face; the widest are those of m and W
ASCENT, DESCENT = 8, 2


@dataclass(frozen=True)
class Box:
    text: str
    left: float
    right: float
    top: float
    bottom: float


def picture(text: str, width: int) -> ElementTree.Element:
    """Of a figure that is drawn for several widths the one for this."""
    (found,) = (svg for svg in ElementTree.fromstring(f"<p>{text}</p>") if svg.get("class") == f"w{width}")
    return found


def texts(svg: ElementTree.Element, kind: str) -> list[str]:
    """Labels of a kind, in the order drawn; a label of several parts as these."""
    named = [e for e in svg.iter("text") if (e.get("class") or "").split()[:1] == [kind]]
    return [part.text or "" for e in named for part in (list(e) or [e])]


def paths(svg: ElementTree.Element, kind: str) -> list[str]:
    return [e.get("d", "") for e in svg.iter("path") if (e.get("class") or "").split() == kind.split()]


def boxes(svg: ElementTree.Element) -> list[Box]:
    return [_box(e) for e in svg.iter("text") if "".join(e.itertext())]


def assert_labels_fit(svg: ElementTree.Element) -> None:
    """Every label is inside the picture, and no two lie on each other."""
    width, height = (float(n) for n in svg.get("viewBox", "").split()[2:])
    found = boxes(svg)
    cut = [b.text for b in found if b.left < -1 or b.right > width + 1 or b.top < 0 or b.bottom > height]
    assert not cut, f"outside of {width}: {cut}"
    over = [(a.text, b.text) for a, b in combinations(found, 2) if _meet(a, b)]
    assert not over, f"on each other at {width}: {over}"


def _box(e: ElementTree.Element) -> Box:
    text, x, y = "".join(e.itertext()), float(e.get("x", "")), float(e.get("y", ""))
    wide = sum(c in "@%MWmw" for c in text)
    width = (len(text) - wide) * LETTER + wide * WIDE + sum(float(part.get("dx", "0")) for part in e)
    kind = (e.get("class") or "").split()
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}[e.get("text-anchor") or _anchor(kind)]
    return Box(text, x - share * width, x + (1 - share) * width, y - ASCENT, y + DESCENT)


def _anchor(kind: Sequence[str]) -> str:
    """As page.css has it."""
    return "middle" if {"group", "figure"} & set(kind) else "end" if {"tick", "end"} & set(kind) else "start"


def _meet(a: Box, b: Box) -> bool:
    return a.left < b.right and b.left < a.right and a.top < b.bottom and b.top < a.bottom
