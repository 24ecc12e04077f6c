"""The page in a browser: what its script opens, and that everything fits windows of any width."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerline.parity.flipped_samples import png
from layerline.pipeline.commands.lookup import LogRows
from layerline.pipeline.report import CHANNELS, FLIPPED, HISTOGRAMS, Gate, Report
from layerline.views.canvas import WIDTHS
from layerline.views.html import LONG, page
from tests.views.samples import LAYERS, diff, many, run_of, sample_reports

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
WINDOWS = (400, 600, 1000, 1440)

# In each frame: how wide the page is, which pictures are seen, what of them is cut or lies on each other, and what
# reaches beyond the window. What scrolls by itself may.
MEASURE = """
const inside = (r, box) => r.left >= box.left - 1 && r.right <= box.right + 1 && r.bottom <= box.bottom + 1;
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
const labels = (svg) => [...svg.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
const seen = (e) => e.getBoundingClientRect().width > 0;
function measure({ contentDocument: page, contentWindow: view }) {
  const pictures = [...page.querySelectorAll("svg")].filter(seen);
  const free = [...page.querySelectorAll("main *")].filter((e) => seen(e) && !e.closest(".scroll, svg"));
  return {
    width: page.documentElement.scrollWidth,
    kinds: [...new Set(pictures.map((svg) => svg.getAttribute("class")))],
    count: pictures.length,
    cut: pictures.flatMap((svg) => labels(svg).filter(([, r]) => !inside(r, svg.getBoundingClientRect()))),
    over: pictures.flatMap((svg) => labels(svg).flatMap(([a, r], i, all) =>
      all.slice(i + 1).filter(([, s]) => meet(r, s)).map(([b]) => [a, b]))),
    out: free.filter((e) => e.getBoundingClientRect().right > view.innerWidth + 1).map((e) => e.outerHTML.slice(0, 80)),
    rows: [...page.querySelectorAll(".follow > .scroll > table > tbody > tr")].map((e) => e.offsetHeight),
  };
}
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(found) }));
});
"""


def rendered(folder: Path, text: str, fragment: str = "") -> str:
    """The document that a browser makes of a page."""
    (folder / "page.html").write_text(text, "utf-8")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    quiet += [
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}/profile",
    ]
    command = [str(CHROMIUM), *quiet, "--dump-dom", (folder / "page.html").as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def measured(folder: Path, text: str) -> dict[int, dict[str, Any]]:
    """What MEASURE finds in windows of WINDOWS, one frame each."""
    frames = "".join(f'<iframe style="width: {w}px; border: 0" srcdoc="{escape(text)}"></iframe>' for w in WINDOWS)
    dom = rendered(folder, f"<!DOCTYPE html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>")
    (found,) = re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    return dict(zip(WINDOWS, json.loads(unescape(found)), strict=True))


def log() -> LogRows:
    return [
        {
            "step": 2500.0 * i,
            "loss": 2 / (i + 1),
            "loss_smooth": 2.1 / (i + 1),
            "lr": 1e-5 / (i + 1),
            "metric_online": float(f"0.98{i}"),
            "metric_deploy": float(f"0.97{i}"),
            "deploy_gap": float(f"-0.00012{i}"),
        }
        for i in range(400)
    ]


def long_names() -> dict[str, Report]:
    """Names of modules, stages, gates and figures that are longer than some windows are wide."""
    name = "model.encoder.layers.{}.attention.self.value_projection_of_the_second_tower"
    records = tuple(diff(f"v{i}", name.format(i), "MatMul", 30.0 - i, tolerance=1e-9) for i in range(40))
    gate = Gate("a-gate-" * 20, False, "x" * 120, "y" * 120, "z" * 120)
    figures: dict[str, Any] = {f"a_measurement_with_a_long_name_{i}": 1e-9 * i for i in range(9)}
    report = Report(stage="quantize-everything-but-the-head", records=records, metrics=figures, gates=(gate,))
    return {report.stage: report, "train": Report(stage="train", notes=("n" * 200,))}


@pytest.mark.parametrize("reports", [sample_reports(), long_names()], ids=["sample", "long names"])
def test_everything_fits_windows_of_any_width(reports: dict[str, Report], tmp_path: Path) -> None:
    found = measured(tmp_path, page("mnist", run_of(reports), reports, logs={"train": log()}))
    for window, seen in found.items():
        assert seen["width"] == window, "no table or name makes the page wider than the window"
        assert seen["out"] == [] and seen["cut"] == [] and seen["over"] == []
        assert seen["count"] == 2, "of each figure one picture"
        assert len(set(seen["rows"])) == 1 or "fuse" not in reports, "short names: one line a layer, whatever its ops"
    assert [seen["kinds"] for seen in found.values()] == [[f"w{width}"] for width in reversed(WIDTHS)]


def test_a_link_opens_a_layer(tmp_path: Path) -> None:
    reports = sample_reports() | {"fuse": many("fuse", 60, 130.0)}
    dom = rendered(tmp_path, page("mnist", run_of(reports), reports), "#layer=layer1.0.conv1")
    follow = dom[dom.index('id="follow"') : dom.index('id="stage-0"')]
    opened = re.findall(r'<tr class="detail">.*?</table>', follow, re.DOTALL)
    assert len(opened) == 1
    assert re.findall(r'<th scope="row">(\w+)</th>', opened[0]) == ["train", "ema", "export", "quantize"]
    assert 'aria-expanded="true"' in follow and 'aria-sort="none"' in follow
    assert re.search(rf"1 of {len({m or n for n, m, _ in LAYERS}) + 60} rows match", follow)
    assert "25 of 60 rows" in dom


# What a person does with the page, in its frame: each step is asked for, and its result is read.
ACTIONS = """
addEventListener("load", () => {
  const { contentDocument: page, contentWindow: view } = document.querySelector("iframe");
  const find = (selector) => page.querySelector(selector);
  const names = "#follow > .grid > .scroll > table > tbody > tr > th";
  const rows = () => [...page.querySelectorAll(names)].map((e) => e.textContent);
  const search = find("#follow input[type=search]");
  const type = (text) => { search.value = text; search.dispatchEvent(new Event("input")); };
  const column = (i) => find(`#follow thead th:nth-child(${i}) button`);
  const press = (target, key) => target.dispatchEvent(new view.KeyboardEvent("keydown", { key }));
  const seen = { first: rows().slice(0, 2), total: rows().length };
  type("layers.3 proj_7");
  seen.found = rows().sort();
  type("");
  column(1).click();
  seen.byName = [rows()[0], find("#follow thead th").ariaSort];
  column(1).click();
  seen.backwards = [rows()[0], page.activeElement === column(1)];
  find("#follow .count button").click();
  seen.more = [rows().length, find("#follow .count").textContent];
  const picture = [...page.querySelectorAll("#heat svg")].find((svg) => svg.getBoundingClientRect().width);
  press(picture, "ArrowRight");
  press(picture, "ArrowRight");
  seen.read = find("#heat .reading").textContent;
  press(picture, "Enter");
  seen.hash = view.location.hash;
  view.dispatchEvent(new Event("hashchange"));
  seen.opened = [search.value, page.querySelectorAll("#follow .detail").length];
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(seen) }));
});
"""


def test_the_page_is_searched_sorted_and_read_by_keyboard(tmp_path: Path) -> None:
    reports = {stage: many(stage, 2000, db) for stage, db in (("export", 130.0), ("quantize", 30.0))}
    inner = tmp_path / "inner.html"
    inner.write_text(page("mnist", run_of(reports), reports), "utf-8")
    frame = f'<iframe style="width: 1200px" srcdoc="{escape(inner.read_text("utf-8"))}"></iframe>'
    dom = rendered(tmp_path, f"<!DOCTYPE html><meta charset=utf-8><body>{frame}<script>{ACTIONS}</script>")
    (found,) = re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    prefix = "model.layers"
    assert json.loads(unescape(found)) == {
        # A value has 30 dB or up to 6 more, by its place; the same figure keeps the network's order.
        "first": [f"{prefix}.0.self_attn.proj_0", f"{prefix}.0.self_attn.proj_7"],
        "total": 25,
        "found": [f"{prefix}.{i}.self_attn.proj_7" for i in (3, *range(30, 40))],
        "byName": [f"{prefix}.0.self_attn.proj_0", "ascending"],
        "backwards": [f"{prefix}.9.self_attn.proj_9", True],
        "more": [525, "525 of 2000 rows show 500 more"],
        "read": f"{prefix}.0.self_attn.proj_1: export 131.0 · quantize 31.0",
        "hash": f"#layer={prefix}.0.self_attn.proj_1",
        "opened": [f"{prefix}.0.self_attn.proj_1", 1],
    }


def test_a_layer_that_was_merged_goes_on_where_it_is_held(tmp_path: Path) -> None:
    conv, norm = diff("c", "net.conv", "Conv", 130.0), diff("n", "net.bn", "BatchNormalization", 128.0)
    reports = {
        "export": Report(stage="export", records=(conv, norm)),
        "fuse": Report(stage="fuse", records=(norm,), merged={"c": "n"}),
        "quantize": Report(stage="quantize", records=(diff("n", "net.conv, net.bn", "Conv", 30.0),)),
    }
    dom = rendered(tmp_path, page("mnist", run_of(reports), reports), "#layer=net.conv")
    (opened,) = re.findall(r'<tr class="detail">.*?</table>', dom, re.DOTALL)
    rows = re.findall(r'<th scope="row">(\w+)</th><td[^>]*>(\w+)</td>', opened)
    assert rows == [("export", "n"), ("export", "c"), ("fuse", "n"), ("quantize", "n")]
    assert "<i>merged into</i>" in dom


def test_an_opened_layer_has_columns_of_what_is_compared_and_the_rest_in_words(tmp_path: Path) -> None:
    exported = diff("c", "net.c", "Conv", 130.0, dtype="float32", shape=(1, 8), tolerance=1e-5)
    quantized = diff("c", "net.c", "Conv", 30.0, extra={"isolated_sqnr_db": 41.0})
    on_engine = diff("c", "net.c", "Conv", extra={"network_layer": "fused_c", "type": "CONVOLUTION"}, dtype="float16")
    reports = {
        "export": Report(stage="export", records=(exported,)),
        "quantize": Report(stage="quantize", records=(quantized,)),
        "engine": Report(stage="engine", records=(on_engine,)),
    }
    dom = rendered(tmp_path, page("mnist", run_of(reports), reports), "#layer=net.c")
    (opened,) = re.findall(r'<tr class="detail">.*?</table>', dom, re.DOTALL)
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", opened.partition("<table")[2], re.DOTALL)
    heads, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in lines]
    assert heads == ["stage", "value", "op", "verdict", "SQNR dB", "rel L2", "own dB"]
    assert rows == [
        ["export", "c", "Conv", "passed", "130.0", "3.16e-07", ""],
        ["", "tolerance 1.00e-05 · judged by rel L2 · shape 1×8 · dtype float32"],
        ["quantize", "c", "Conv", "", "30.0", "0.0316", "41.0"],
        ["engine", "c", "Conv", "", "", "", ""],
        ["", "engine layer fused_c · type CONVOLUTION · dtype float16"],
    ]


def test_an_opened_layer_shows_how_its_values_are_quantised(tmp_path: Path) -> None:
    rows = [
        {"value": "c", "role": "activation", "module": "net.next", "clipped": 0.25},
        {"value": "w", "module": "net.c"},
    ]
    drawn = {"value": "c", "module": "net.next", "range": 2.0, "end": 4.0, "profile": "z" + "i" * 32 + "0" * 31}
    shares = ((2, 20.0, 0.2), (7, 0.0, 0.8))
    channels = [{"value": "c", "channel": n, "own_sqnr_db": db, "share": share} for n, db, share in shares]
    picture = f"data:image/png;base64,{base64.b64encode(png(np.zeros((4, 4), np.uint8))).decode()}"
    flips = [{"sample": 1, "became": "wrong", "picture": picture}]
    tables = {"quantized": rows, HISTOGRAMS: [drawn], CHANNELS: channels, FLIPPED: flips}
    report = Report(
        stage="quantize", records=(diff("c", "net.c", db=30.0), diff("d", "net.next", db=20.0)), tables=tables
    )
    text = page("mnist", run_of({"quantize": report}), {"quantize": report})
    (detail,) = re.findall(
        r'<tr class="detail">.*?</figure></td></tr>', rendered(tmp_path, text, "#layer=net.c"), re.DOTALL
    )
    assert re.findall(r"<p>(.*?)</p>", detail) == [
        "c: role activation · module net.next · clipped % 25.00",
        "w: module net.c",
    ]
    bars = re.findall(r'<label><span>(\d+)</span><progress max="0.8" value="(.*?)"></progress>(.*?)</label>', detail)
    assert bars == [("7", "0.8", "80.0 %; 0.0"), ("2", "0.2", "20.0 %; 20.0")]
    # 35 of 36 levels are 58.3 of 60 units, 18 are 30; the range ends in the middle of 64 bars of 6 units.
    (bars,) = re.findall(r'<path class="bar" d="(.*?)"', detail)
    assert bars.startswith("M0 60v-58.3") and bars.count("v-30h5") == 31
    (beyond,) = re.findall(r'<path class="bad" d="(.*?)"', detail)
    assert beyond.startswith("M192 60v-30h5") and beyond.count("v-0h5") == 31 and "M192 0V60" in detail
    assert f"<summary>{HISTOGRAMS}" not in text, "they are drawn, and not listed"
    assert "<b>c</b> in calibration" in rendered(tmp_path, text, "#layer=net.next"), "at the layer that reads it too"


def test_long_texts_are_wrapped_with_the_script_and_without(tmp_path: Path) -> None:
    rows = [{"value": "a", "why": "w" * LONG}, {"value": "b", "why": "w" * (LONG + 1)}, {"value": "c" * 90, "why": "d"}]
    report = Report(stage="quantize", tables={"Left in float": rows})
    text = page("mnist", run_of({"quantize": report}), {"quantize": report})
    for document in (text, rendered(tmp_path, text)):
        ours, _ = document.split("What the columns mean", 1)
        assert re.findall(r'<td class="text long">(.*?)</td>', ours) == ["w" * (LONG + 1)]
