"""The terminal's one door: what is escaped, and that columns keep their width."""

from __future__ import annotations

import io
import math

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from layerline.pipeline.commands.lookup import Beside
from layerline.pipeline.errors import PipeError
from layerline.pipeline.report import Gate, Report
from layerline.pipeline.run.outcome import Result
from layerline.views import report_output, screen, terminal
from layerline.views.html import page
from tests.views.samples import diff, record, run_of

ODD = "conv\x1b[31m\x9b2J\x07\r\u202e\u2028:bug:[bold]"
SHOWN = "conv\\x1b[31m\\x9b2J\\x07\\x0d\\u202e\\u2028:bug:[bold]"


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def odd_report() -> Report:
    layer = diff(ODD, f"block.{ODD}", ODD, 9.3, tolerance=0.1, shape=(ODD, 3), extra={"cause": ODD, ODD: ODD})
    return Report(
        stage="quantize",
        reference=ODD,
        candidate=ODD,
        records=(layer, diff("relu", "block", "Relu", math.inf)),
        metrics={ODD: 1.0, "calibrated": ODD},
        gates=(Gate(ODD, False, ODD, ODD, ODD),),
        notes=(ODD,),
        tables={ODD: [{ODD: ODD}]},
        merged={ODD: "relu"},
    )


@pytest.mark.parametrize("show", ["segment", "string", "text", "table", "bar"])
def test_every_kind_of_output_is_plain(show: str) -> None:
    file = io.StringIO()
    out = screen.Screen(file=file, width=200)
    if show == "bar":
        with Progress(TextColumn("{task.description}", markup=False), console=out) as bar:
            bar.add_task(ODD)
    elif show == "table":
        table = Table()
        table.add_column(ODD)
        table.add_row(ODD)
        table.add_row(Text(ODD))
        out.print(table)
    else:
        out.print({"segment": Text(ODD), "string": ODD, "text": screen.words(ODD)}[show], soft_wrap=True)
    assert is_plain(file.getvalue()) and "\\x1b[31" in file.getvalue()
    assert show == "bar" or ":bug:[bold]" in file.getvalue(), "neither emoji nor markup"


def test_the_table_of_a_report_keeps_its_columns() -> None:
    file = io.StringIO()
    beside = Beside(run_of({"quantize": odd_report()}), odd_report(), (ODD,))
    report_output.diff(screen.Screen(file=file, width=1000), odd_report(), 9, "error", beside)
    text = file.getvalue()
    lines = text.splitlines()
    assert is_plain(text) and SHOWN in text
    where = lines[2].index("now dB") + len("now dB")
    assert [line[where - 5 : where] for line in lines[3:5]] == ["  9.3", "equal"]


def test_the_line_of_a_stage_is_plain_and_no_wider() -> None:
    result = Result(name="quantize", state="ran", reason=ODD, seconds=1.0, record=record(odd_report()))
    for width in (80, 100, 140):
        file = io.StringIO()
        terminal.Live(screen.Screen(file=file, width=width), 8).finished(result)
        assert all(len(line) <= width for line in file.getvalue().splitlines()) and is_plain(file.getvalue())


def test_an_error_is_plain(capfd: pytest.CaptureFixture[str]) -> None:
    screen.error(PipeError(ODD, where=ODD, hint=f"{ODD}\nusage"))
    assert capfd.readouterr().err == f"error {SHOWN}: {SHOWN}\n  {SHOWN}\nusage\n"


def test_the_page_holds_no_control_character() -> None:
    report = odd_report()
    text = page(f"mine {ODD}", run_of({"quantize": report}), {"quantize": report}, [ODD])
    assert is_plain(text) and SHOWN in text and ":bug:[bold]" in text


def test_what_is_cleaned_is_equal_but_for_its_text() -> None:
    report = Report(stage="fuse", records=(diff("a", "b", db=math.inf),), tables={"t": [{"k": None}]})
    assert screen.cleaned(report) == report
    odd = screen.cleaned(odd_report())
    assert odd.records[0].name == SHOWN and odd.records[0].shape == (SHOWN, 3) and odd.merged == {SHOWN: "relu"}
