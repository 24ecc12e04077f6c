"""Records by key, reports by digest, runs by time: each found again, none torn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from pathlib import Path

import pytest

from layerline.pipeline.errors import PipeError
from layerline.pipeline.records.ledger import Ledger, Record, Run, new_run_id
from layerline.pipeline.report import LayerDiff, Report


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def record(key: str = "k1", stage: str = "train", digest: str = "d1", report: str = "r1") -> Record:
    return Record(
        stage=stage,
        key=key,
        digest=digest,
        kind="checkpoint",
        report=report,
        passed=True,
        seconds=1.5,
        created="2026-01-01T00:00:00Z",
        parts={"config.lr": "0.1", "hook.model": "ab"},
        notes=("model(): task.py counts whole",),
        worst={"layer": "conv1", "value": "relu", "sqnr_db": "inf", "cosine": None},
        metrics={"accuracy": 0.98, "loss": "nan"},
    )


def test_a_record_comes_back_as_it_was(ledger: Ledger) -> None:
    assert ledger.get("k1") is None
    ledger.put(record())
    assert ledger.get("k1") == record()
    ledger.put(dataclasses.replace(record(), digest="d2"))
    assert ledger.get("k1") == dataclasses.replace(record(), digest="d2")


def test_runs_come_newest_first_and_are_found_by_prefix(ledger: Ledger) -> None:
    for id_ in ("20260101-a", "20260102-b", "20260102-c"):
        ledger.put_run(Run(id_, True, (record(digest=id_),), ()))
    assert [r.id for r in ledger.runs()] == ["20260102-c", "20260102-b", "20260101-a"]
    assert ledger.head("train") == record(digest="20260102-c")
    assert ledger.head("ema") is None
    found = {name: ledger.find_run(name).id for name in ("last", "previous", "20260101", "20260102-b")}
    assert list(found.values()) == ["20260102-c", "20260102-b", "20260101-a", "20260102-b"]
    with pytest.raises(
        PipeError, match=r"more than one run matches '20260102'\n  give more of its id: 20260102-c, 20260102-b"
    ):
        ledger.find_run("20260102")
    with pytest.raises(PipeError, match="no run matches 'x'"):
        ledger.find_run("x")


def test_no_run_yet(ledger: Ledger) -> None:
    for name in ("last", "previous", "2026"):
        with pytest.raises(PipeError, match="there is no run yet\n  pipe run all"):
            ledger.find_run(name)


def test_ids_of_quick_runs_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**18, 10**18 + 50_000, 1000))
    monkeypatch.setattr(time, "time_ns", lambda: next(now))
    ids = [new_run_id() for _ in range(50)]
    assert ids == sorted(ids) and len(set(ids)) == 50
    assert ids[0].startswith("20010909-014640-000000-")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '{"key": "k1"}', "\0"])
def test_a_torn_record_is_found_in_the_runs(text: str, ledger: Ledger, tmp_path: Path) -> None:
    ledger.put(record())
    (tmp_path / "ledger" / "keys" / "k1.json").write_text(text)
    assert ledger.get("k1") is None
    ledger.put_run(Run("1", True, (record("k0"), record()), ()))
    assert ledger.get("k1") == record()


def test_a_record_under_another_s_key_is_not_believed(ledger: Ledger, tmp_path: Path) -> None:
    ledger.put(record("k2"))
    (tmp_path / "ledger" / "keys" / "k2.json").rename(tmp_path / "ledger" / "keys" / "k1.json")
    assert ledger.get("k1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "2", "passed": true, "records": [5]}', '{"records": null}'])
def test_a_torn_run_is_passed_over(text: str, ledger: Ledger, tmp_path: Path) -> None:
    ledger.put_run(Run("1", True, (record(),), ()))
    (tmp_path / "ledger" / "runs" / "2.json").write_text(text)
    assert [r.id for r in ledger.runs()] == ["1"]


def test_a_report_comes_back_as_it_was_and_is_checked(ledger: Ledger, tmp_path: Path) -> None:
    layer = LayerDiff(name="relu", op="Relu", sqnr_db=math.inf, shape=("batch", 3))
    report = Report(stage="export", records=(layer,), metrics={"x": -math.inf})
    digest = ledger.put_report(report)
    assert ledger.put_report(report) == digest
    assert ledger.report(record(report=digest)) == report
    path = tmp_path / "ledger" / "reports" / f"{digest}.json"
    path.write_bytes(path.read_bytes().replace(b"relu", b"relv"))
    with pytest.raises(
        PipeError, match=r"\.json: the report of stage train is missing or damaged: .*\n  .* pipe run train --force"
    ):
        ledger.report(record(report=digest))
    ledger.put_report(report)  # made again, it is whole again
    assert ledger.report(record(report=digest)) == report


def test_forget_lists_what_nothing_needs(ledger: Ledger, tmp_path: Path) -> None:
    reports = [ledger.put_report(Report(stage=f"s{i}")) for i in range(4)]
    records = [record(f"k{i}", digest=f"d{i}", report=reports[i]) for i in range(4)]
    for i, r in enumerate(records):
        ledger.put(r)
        ledger.put_run(Run(f"run{i}", True, (r,), ()))
    names = {p.name for p in ledger.forget(1, {"d3", "d1"})}
    dropped = {"run0.json", "run1.json", "run2.json", "k0.json", "k2.json", f"{reports[0]}.json", f"{reports[2]}.json"}
    assert names == dropped
    assert json.loads((tmp_path / "ledger" / "keys" / "k0.json").read_text())  # it only lists


@pytest.mark.parametrize("id_", ["../../../victim", "/etc/passwd", "a/b", "..", "", ".hidden", "a\nb", "x" * 300])
def test_an_id_that_is_no_name_makes_no_path(id_: str, ledger: Ledger, tmp_path: Path) -> None:
    ledger.put_run(Run("1", True, (record(),), ()))
    path = tmp_path / "ledger" / "runs" / "2.json"
    whole = json.loads((path.with_name("1.json")).read_text())
    path.write_text(json.dumps(whole | {"id": id_}))
    assert [r.id for r in ledger.runs()] == ["1"]
    path.write_text(json.dumps(whole | {"id": "2", "records": [whole["records"][0] | {"report": id_}]}))
    assert [r.id for r in ledger.runs()] == ["1"]
    assert [p.name for p in ledger.forget(0, set())] == ["1.json", "2.json"]


NONSENSE = ["5", "null", "[]", '"text"', "[[[]]]", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN", "\ud800", "\0"]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
@pytest.mark.parametrize("field", ["", "id", "passed", "records", "sets", "sequence"])
def test_a_run_of_another_form_is_passed_over_and_told(text: str, field: str, ledger: Ledger, tmp_path: Path) -> None:
    ledger.put_run(Run("1", True, (record(),), ("train",)))
    whole = (tmp_path / "ledger" / "runs" / "1.json").read_text()
    path = tmp_path / "ledger" / "runs" / "2.json"
    content = whole.replace('"id": "1"', '"id": "2"')
    if field:
        value = json.dumps(json.loads(content)[field], indent=1).replace("\n", "\n ")
        assert f'"{field}": {value}' in content
        content = content.replace(f'"{field}": {value}', f'"{field}": {text}', 1)
    path.write_text(content if field else text, "utf-8", "surrogatepass")
    if (field, text) in {("sequence", "5"), ("records", "[]"), ("sets", "[]")}:
        assert [r.id for r in ledger.runs()] == ["2", "1"]  # that is a run
        return
    assert [r.id for r in ledger.runs()] == ["1"]
    assert [what for what, _ in ledger.damaged()] == ["run 2"]
    assert ledger.set_aside() == ["2"] and list(ledger.damaged()) == []
    assert path.with_name("2.json.damaged") in ledger.forget(9, {"d1"})


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
@pytest.mark.parametrize("field", ["stage", "digest", "report", "passed", "seconds", "parts", "worst", "metrics"])
def test_a_record_of_another_form_is_damaged(text: str, field: str, ledger: Ledger, tmp_path: Path) -> None:
    ledger.put(record())
    path = tmp_path / "ledger" / "keys" / "k1.json"
    raw = json.loads(path.read_text())
    if text in ("5", '"text"', "null") and field in ("stage", "digest", "report", "seconds", "worst"):
        return  # may be right there
    path.write_text(json.dumps(raw | {field: "PLACE"}).replace('"PLACE"', text), "utf-8", "surrogatepass")
    assert ledger.get("k1") is None
    assert [what for what, _ in ledger.damaged()] == ["record k1"]
    ledger.put_run(Run("1", True, (record(),), ()))
    assert ledger.get("k1") == record()
    ledger.put(record())
    assert list(ledger.damaged()) == []


def test_folders_where_files_belong_and_files_where_folders_belong(ledger: Ledger, tmp_path: Path) -> None:
    root = tmp_path / "ledger"
    root.write_text("a file")
    ledger.put(record())
    ledger.put_run(Run("1", True, (record(),), ()))
    (root / "keys" / "k1.json").unlink()
    (root / "keys" / "k1.json").mkdir()
    (root / "runs" / "2.json").mkdir()
    assert ledger.get("k1") == record() and [r.id for r in ledger.runs()] == ["1"]
    assert [what for what, _ in ledger.damaged()] == ["record k1", "run 2"]
    digest = ledger.put_report(Report(stage="train"))
    (root / "reports" / f"{digest}.json").unlink()
    (root / "reports" / f"{digest}.json").mkdir()
    with pytest.raises(PipeError, match="missing or damaged"):
        ledger.report(record(report=digest))
    assert ledger.put_report(Report(stage="train")) == digest
    assert ledger.report(record(report=digest)).stage == "train"


def test_a_link_in_the_ledger_leads_nowhere(ledger: Ledger, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "keys").symlink_to(outside)
    ledger.put(record())
    assert list(outside.iterdir()) == [] and ledger.get("k1") == record()


def test_runs_are_ordered_by_their_numbers_and_not_by_the_clock(ledger: Ledger) -> None:
    early, late = "20260101-100000-000000-aa", "20260102-100000-000000-aa"
    ledger.put_run(Run(late, True, (record(digest="old"),), (), sequence=ledger.next_sequence()))
    ledger.put_run(Run(early, True, (record(digest="new"),), (), sequence=ledger.next_sequence()))
    assert [(r.id, r.sequence) for r in ledger.runs()] == [(early, 2), (late, 1)]
    head = ledger.head("train")
    assert head is not None and head.digest == "new"
    assert ledger.find_run("last").id == early and ledger.find_run("previous").id == late
    assert [p.stem for p in ledger.forget(1, {"new", "old"})] == [late]


def test_a_report_of_another_form_under_its_own_hash_is_damaged(ledger: Ledger, tmp_path: Path) -> None:
    for text in NONSENSE:
        data = text.encode("utf-8", "surrogatepass")
        path = tmp_path / "ledger" / "reports" / f"{hashlib.sha256(data).hexdigest()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        with pytest.raises(PipeError, match="missing or damaged"):
            ledger.report(record(report=path.stem))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stage": 5}, "stage"),
        ({"records": {"a": 1}}, "records"),
        ({"records": [{"name": "a", "op": "b", "sqnr_db": "much"}]}, "records.0.sqnr_db"),
        ({"records": [{"name": "a", "op": "b", "shape": [[1]]}]}, "records.0.shape"),
        ({"records": [{"name": "a", "op": "b", "rel_l2": -1}]}, "records.0.rel_l2"),
        ({"records": [{"name": "a", "op": "b", "cosine": 1e308}]}, "records.0.cosine"),
        ({"records": [{"name": "a", "op": "b", "one_sided": -1}]}, "records.0.one_sided"),
        ({"records": [{"name": "a", "op": "b", "judged": "__class__"}]}, "records.0.judged"),
        ({"records": [{"name": "a", "op": "b", "extra": {"floor": [1]}}]}, "records.0.extra"),
        ({"gates": [{"name": "g", "passed": "perhaps", "seen": "", "expected": ""}]}, "gates.0.passed"),
        ({"metrics": {"accuracy": {}}}, "metrics.accuracy"),
        ({"notes": "text"}, "notes"),
        ({"tables": {"t": [1]}}, "tables.t.0"),
        ({"merged": {"a": 1}}, "merged.a"),
    ],
)
def test_a_report_with_a_field_of_another_type_is_damaged(
    change: dict[str, object], field: str, ledger: Ledger, tmp_path: Path
) -> None:
    text = json.dumps({**json.loads(Report(stage="train").to_json()), **change})
    path = tmp_path / "ledger" / "reports" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(PipeError, match=rf"missing or damaged: {re.escape(field)}") as raised:
        ledger.report(record(report=path.stem))
    assert raised.value.where == str(path)


def test_a_report_beyond_the_bound_is_damaged_and_not_read(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "reports" / f"{'0' * 64}.json"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes take no disk
    assert not ledger.report_is_whole("0" * 64)
    with pytest.raises(PipeError, match=r"missing or damaged: .*larger than 67108864 bytes"):
        ledger.report(record(report="0" * 64))
