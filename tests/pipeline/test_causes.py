"""The rules behind `pipe why`, each on figures that show its fault and on figures that do not."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import metadata

import pytest

from layerline.pipeline.diagnosis import causes, quantize_causes, why
from layerline.pipeline.diagnosis.causes import Evidence
from layerline.pipeline.diagnosis.evidence import NonFinite
from layerline.pipeline.errors import Unavailable
from layerline.pipeline.report import Gate, LayerDiff, Report


def record(name="relu", op="Relu", *, own=None, clipped=None, **fields) -> LayerDiff:
    extra = {"isolated_sqnr_db": own, "clipped": clipped}
    return LayerDiff(name=name, op=op, extra={k: v for k, v in extra.items() if v is not None}, **fields)


def evidence(stage, *records, lost=True, settings=None, logs=None, **fields) -> Evidence:
    report = Report(stage=stage, records=records, **fields)
    losses = {stage: "accuracy 0.9 -> 0.5"} if lost else {}
    return Evidence(reports={stage: report}, settings={stage: settings or {}}, losses=losses, logs=logs or {})


def only(rule, seen: Evidence):
    (cause,) = rule(seen)
    return cause


def test_the_value_that_is_clipped_most_is_named() -> None:
    seen = evidence("quantize", record("a", own=15.0, clipped=0.02), record("b", own=12.0, clipped=0.1))
    cause = only(quantize_causes.clipped_range, seen)
    assert (cause.layer, cause.setting) == ("b", "quantize.calibrator=minmax")
    assert "10 %" in cause.evidence and "1 other" in cause.evidence and cause.confidence == 0.9


@pytest.mark.parametrize(("own", "clipped"), [(60.0, 0.1), (15.0, 0.001)])
def test_clipping_without_harm_is_no_cause(own, clipped) -> None:
    assert not list(quantize_causes.clipped_range(evidence("quantize", record(own=own, clipped=clipped))))


def test_what_minmax_clips_calls_for_other_samples() -> None:
    seen = evidence("quantize", record(own=5.0, clipped=0.2), settings={"calibrator": "minmax"})
    cause = only(quantize_causes.clipped_range, seen)
    assert not cause.setting and "eval_data" in cause.advice


def row(worst, *, axis=0, whole=30.0):
    return {"value": "fc.weight", "role": "weight", "module": "fc", "axis": axis, "sqnr_db": whole,
            "worst_channel_db": worst}  # fmt: skip


def test_uneven_channels_under_one_scale() -> None:
    seen = evidence("quantize", tables={"quantized": [row(5.0, axis=None)]}, settings={"per_channel": False})
    cause = only(quantize_causes.uneven_channels, seen)
    assert (cause.layer, cause.setting) == ("fc", "quantize.per_channel=true")
    assert "5.0 dB" in cause.evidence and "30.0 dB" in cause.evidence


def test_uneven_channels_that_have_their_scales_go_to_half_precision_beside_what_is_set() -> None:
    settings = {"layers": {"head": "bf16"}}
    seen = evidence("quantize", tables={"quantized": [row(5.0)]}, settings=settings)
    cause = only(quantize_causes.uneven_channels, seen)
    assert cause.setting == 'quantize.layers={"head": "bf16", "fc": "bf16"}'


@pytest.mark.parametrize(("worst", "whole"), [(25.0, 45.0), (15.0, 20.0)])
def test_even_channels_are_no_cause(worst, whole) -> None:
    seen = evidence("quantize", tables={"quantized": [row(worst, whole=whole)]})
    assert not list(quantize_causes.uneven_channels(seen))


def test_layers_with_the_least_own_sqnr_come_first() -> None:
    rows = [record(f"v{i}", own=float(i)) for i in (19, 3, 11, 7, 40)]
    seen = evidence("quantize", *rows)
    assert [cause.layer for cause in quantize_causes.sensitive_layers(seen)] == ["v3", "v7", "v11"]


def test_a_layer_without_any_signal_left_is_no_small_loss() -> None:
    rows = [record("a", own=30.0), record("b", own=-math.inf), record("c", own=math.inf)]
    cause = only(quantize_causes.sensitive_layers, evidence("quantize", *rows))
    assert cause.layer == "b" and "-inf dB" in cause.evidence
    rows[1] = replace(rows[1], extra={**rows[1].extra, "rounding_sqnr_db": 30.0})
    assert only(quantize_causes.unexplained_error, evidence("quantize", *rows)).layer == "b"
    assert not list(quantize_causes.sensitive_layers(evidence("quantize", rows[2])))


def test_many_small_losses() -> None:
    cause = only(quantize_causes.sensitive_layers, evidence("quantize", record("a", own=30.0), record("b", own=25.0)))
    assert (cause.name, cause.layer, cause.setting) == ("many small losses", "b", "quantize.search=true")


@pytest.mark.parametrize(("gain", "named"), [(30.0, "a layer that int8 does not suit"), (3.0, "many small losses")])
def test_a_layer_that_costs_the_outputs_most_is_no_small_loss(gain, named) -> None:
    rows = [record("a", own=37.0), record("b", own=40.0)]
    rows[1] = replace(rows[1], extra={**rows[1].extra, "gain_db": gain})
    cause = only(quantize_causes.sensitive_layers, evidence("quantize", *rows))
    assert (cause.name, cause.layer) == (named, "b" if gain > 10 else "a")


def test_the_class_that_lost_most() -> None:
    rows = [{"slice": k, "metric": "accuracy", "change": change} for k, change in ((0, -0.01), (7, -0.6), (3, 0.0))]
    assert only(quantize_causes.lost_slice, evidence("quantize", tables={"slices": rows})).layer == "7"
    rows[0]["change"] = rows[2]["change"] = -0.5
    assert not list(quantize_causes.lost_slice(evidence("quantize", tables={"slices": rows})))


def test_classes_are_compared_within_one_metric() -> None:
    rows = [{"slice": k, "metric": "loss", "change": change} for k, change in ((0, 0.1), (1, 4.0), (2, -0.1))]
    rows += [{"slice": k, "metric": "accuracy", "change": -0.3} for k in (0, 1, 2)]
    settings = {"max_drop": {"loss": {"drop": None, "rise": 0.1}, "accuracy": {"drop": "1%", "rise": None}}}
    cause = only(quantize_causes.lost_slice, evidence("quantize", tables={"slices": rows}, settings=settings))
    assert cause.layer == "1" and "loss of 1 got worse by 4, the others by 0 " in cause.evidence


def test_a_name_with_brackets_is_no_pattern() -> None:
    cause = only(causes.not_finite, evidence("quantize", record("a[0]", one_sided=1), settings={"mode": "fp16"}))
    assert cause.setting == 'quantize.layers={"a[[]0]": "fp32"}'


def test_an_average_that_lags() -> None:
    rows = [record(f"w{i}", "parameter", rel_l2=distance) for i, distance in enumerate((0.5, 0.2, 0.01))]
    cause = only(causes.average_lags, evidence("ema", *rows))
    assert (cause.layer, cause.setting) == ("w0", "ema.weights=online") and "2 of 3" in cause.evidence
    assert not list(causes.stale_statistics(evidence("ema", *rows)))


def test_stale_statistics() -> None:
    rows = [record("w", "parameter", rel_l2=0.01), record("bn", "BatchNorm2d", sqnr_db=3.0)]
    cause = only(causes.stale_statistics, evidence("ema", *rows))
    assert cause.layer == "bn" and "3.0 dB" in cause.evidence
    assert not list(causes.average_lags(evidence("ema", *rows)))


@pytest.mark.parametrize(
    ("settings", "name", "setting"),
    [
        ({"mode": "fp16"}, "overflow of half precision", 'quantize.layers={"b": "fp32"}'),
        ({"mode": "int8", "rest": "fp32"}, "values that are not finite", ""),
    ],
)
def test_the_first_value_that_is_not_finite(settings, name, setting) -> None:
    rows = [record("a"), record("b", one_sided=4, nonfinite_b=4), record("c", one_sided=9, nonfinite_b=9)]
    cause = only(causes.not_finite, evidence("quantize", *rows, settings=settings, lost=False))
    assert (cause.name, cause.layer, cause.setting) == (name, "b", setting)
    assert "first of 2" in cause.evidence and "4 elements" in cause.evidence


def test_the_first_value_beyond_its_tolerance() -> None:
    rows = [record("a", rel_l2=1e-7, tolerance=1e-6), record("b", rel_l2=0.5, tolerance=1e-6)]
    cause = only(causes.parity_failed, evidence("export", *rows, lost=False))
    assert cause.layer == "b" and "0.5" in cause.evidence and "1e-06" in cause.evidence


def test_a_gate_that_says_what_is_wrong() -> None:
    gates = (
        Gate("accuracy budget", False, "0.9 -> 0.1", "a drop of at most 0.5% of it"),
        Gate("calibration data", False, "x reaches 255 in the calibration data and 1 in eval_data()", "alike", "scale"),
    )
    cause = only(causes.failed_gates, evidence("quantize", gates=gates))
    assert (cause.name, cause.advice) == ("calibration data", "scale") and "255" in cause.evidence


def test_a_value_that_differs_comes_before_the_gates_that_follow_from_it() -> None:
    gates = [Gate(f"module itself, batch={n}", False, f"seen {n}", "little") for n in (1, 3)]
    bad = record("y", "Gemm", rel_l2=0.5, tolerance=0.1, module="fc")
    listed = why.ranked(evidence("export", bad, gates=tuple(gates)))
    assert [cause.name for cause in listed] == [causes.PARITY, "module itself"]
    assert listed[0].layer == "fc" and listed[1].evidence == "batch=1: seen 1; expected little; 1 more fail"


def test_a_loss_that_rose_again() -> None:
    good = [{"step": i, "loss": 2.0 / (i + 1)} for i in range(40)]
    assert not list(causes.training_diverged(evidence("train", logs={"train": good})))
    bad = good[:30] + [{"step": i, "loss": 1.5} for i in range(30, 40)]
    assert "1.5" in only(causes.training_diverged, evidence("train", logs={"train": bad})).evidence


def test_the_last_rows_of_a_log_count() -> None:
    rows = [{"step": i, "loss": 0.1} for i in range(20)] + [{"step": i, "loss": 9.0} for i in (20, 21, 22)]
    # Quarters of 5 rows: the last has two of 0.1 and three of 9.
    assert "5.44" in only(causes.training_diverged, evidence("train", logs={"train": rows})).evidence


def test_a_loss_below_zero_may_move_a_little() -> None:
    rows = [{"step": i, "loss": -2.0 + 0.1 * (i >= 30)} for i in range(40)]
    assert not list(causes.training_diverged(evidence("train", logs={"train": rows})))


def test_a_sound_project_is_told_so() -> None:
    rows = [record("a", own=12.0, clipped=0.5, sqnr_db=10.0)]
    tables = {"quantized": [row(1.0)], "slices": [{"slice": 1, "metric": "m", "change": -0.9}]}
    seen = evidence("quantize", *rows, tables=tables, lost=False)
    assert why.ranked(seen) == []
    assert why.verdict(seen, []) == ["no loss was found in any stage"]


def test_the_earliest_stage_comes_first_then_the_likeliest_cause() -> None:
    quantized = Report(stage="quantize", records=(record("q", own=3.0, clipped=0.3),))
    averaged = Report(stage="ema", records=(record("w", "parameter", rel_l2=math.inf),))
    losses = {"ema": "accuracy 0.9 -> 0.8", "quantize": "accuracy 0.8 -> 0.1"}
    ranked = why.ranked(Evidence(reports={"ema": averaged, "quantize": quantized}, losses=losses))
    assert [cause.layer for cause in ranked] == ["w", "q", "q"]
    sentences = why.verdict(Evidence(reports={"ema": averaged, "quantize": quantized}, losses=losses), ranked)
    assert sentences[0] == "lost in ema: accuracy 0.9 -> 0.8" and "w" in sentences[2]


def test_a_stage_that_lost_something_comes_before_one_that_did_not() -> None:
    rows = [{"step": i, "loss": float(i >= 30)} for i in range(40)]
    quantized = Report(stage="quantize", records=(record("q", own=3.0, clipped=0.3),))
    reports = {"train": Report(stage="train"), "quantize": quantized}
    losses = {"quantize": "accuracy 0.8 -> 0.1"}
    ranked = why.ranked(Evidence(reports=reports, losses=losses, logs={"train": rows}))
    assert [cause.stage for cause in ranked] == ["quantize", "quantize", "train"]


def test_a_loss_that_no_rule_explains() -> None:
    seen = evidence("fuse", record("a", rel_l2=1e-7))
    assert why.verdict(seen, why.ranked(seen))[1] == "no rule explains it: see pipe diff fuse"


def own_rule(seen):
    yield causes.Cause(name="mine", stage="fuse", evidence="figures", advice="change it", confidence=1.0)


@pytest.mark.parametrize("value", ["tests.pipeline.test_causes:own_rule", "tests.pipeline.test_causes:missing"])
def test_rules_of_another_distribution(monkeypatch, value) -> None:
    entry = metadata.EntryPoint("own", value, causes.GROUP)
    monkeypatch.setattr(causes.metadata, "entry_points", lambda *, group: [entry] if group == causes.GROUP else [])
    seen = evidence("fuse", record("a"))
    if value.endswith("missing"):
        with pytest.raises(Unavailable, match="can't be imported"):
            why.ranked(seen)
    else:
        assert [cause.name for cause in why.ranked(seen)] == ["mine"]


def test_a_clipped_value_counts_by_the_layer_that_reads_it() -> None:
    fields = {"role": "activation", "axis": None}
    tables = {"quantized": [{"value": "x", "module": "fc1", **fields}, {"value": "r", "module": "fc2", **fields}]}
    rows = [record("x", "Input", own=math.inf, clipped=0.3), record("a", "Gemm", own=50.0, module="fc1"),
            record("r", own=math.inf, clipped=0.1), record("b", "Gemm", own=8.0, module="fc2, fc2.bn")]  # fmt: skip
    cause = only(quantize_causes.clipped_range, evidence("quantize", *rows, tables=tables))
    assert (cause.layer, cause.confidence) == ("r", 0.9)
    assert not list(quantize_causes.clipped_range(evidence("quantize", *rows[:2], tables=tables)))


@pytest.mark.parametrize(("used", "named"), [(0.02, ["r"]), (0.5, []), (1.3, []), (None, [])])
def test_a_range_far_beyond_the_data(used, named) -> None:
    tables = {"quantized": [{"value": "r", "role": "activation", "module": "fc2", "range_used": used}]}
    assert [cause.value for cause in quantize_causes.coarse_range(evidence("quantize", tables=tables))] == named


def test_calibration_data_unlike_the_samples() -> None:
    rows = [record("a", own=-0.5, clipped=0.0), record("b", own=4.0), record("c", own=30.0)]
    cause = only(quantize_causes.unlike_calibration, evidence("quantize", *rows))
    assert cause.layer == "a" and "2 of 3" in cause.evidence and not cause.setting
    clipped = [record("a", own=-0.5, clipped=0.3), record("b", own=4.0, clipped=0.2)]
    assert not list(quantize_causes.unlike_calibration(evidence("quantize", *clipped)))


def test_a_value_that_evaluation_alone_takes_beyond_its_range() -> None:
    quantized = {"value": "r", "role": "activation", "module": "fc1, fc2", "clipped": 0.001, "clipped_there": 0.2}
    layer = record("y", own=8.0, module="fc2, act")
    cause = only(quantize_causes.unlike_calibration, evidence("quantize", layer, tables={"quantized": [quantized]}))
    assert (cause.layer, cause.value, cause.stage) == ("fc1, fc2", "r", "quantize")
    assert "20 % of r" in cause.evidence and "0.1 % in calibration" in cause.evidence
    for change in ({"clipped": 0.06}, {"clipped_there": 0.004}, {"clipped_there": None}):
        seen = evidence("quantize", layer, tables={"quantized": [quantized | change]})
        assert not list(quantize_causes.unlike_calibration(seen)), change
    kept = evidence("quantize", record("y", own=30.0, module="fc2"), tables={"quantized": [quantized]})
    assert not list(quantize_causes.unlike_calibration(kept)), "the layer that reads it keeps its signal"


def test_an_error_that_rounding_does_not_explain() -> None:
    rows = [record(name, own=own) for name, own in (("a", 34.0), ("b", 9.0), ("c", 20.0))]
    rows = [replace(row, extra={**row.extra, "rounding_sqnr_db": 38.0}) for row in rows]
    cause = only(quantize_causes.unexplained_error, evidence("quantize", *rows))
    assert cause.value == "b" and "9.0 dB" in cause.evidence and "38.0 dB" in cause.evidence
    assert not list(quantize_causes.unexplained_error(evidence("quantize", rows[0])))


def test_one_weight_of_the_average_that_stayed_behind() -> None:
    rows = [record(f"w{i}", "parameter", rel_l2=0.02) for i in range(5)] + [record("v", "parameter", rel_l2=0.9)]
    cause = only(causes.average_lags, evidence("ema", *rows))
    assert cause.value == "v" and cause.setting == "ema.weights=online" and "0.02" in cause.evidence
    assert not list(causes.average_lags(evidence("ema", *rows[:5])))


def test_nan_of_rare_samples_is_named_though_no_probe_has_it() -> None:
    samples = NonFinite(count=3, samples=200, value="sqrt", module="body")
    seen = Evidence(reports={"train": Report(stage="train")}, nonfinite={"train": samples})
    cause = only(causes.not_finite, seen)
    assert (cause.name, cause.stage, cause.place) == ("values that are not finite", "train", "body (sqrt)")
    assert "3 of 200 samples" in cause.evidence


def test_a_likeliest_cause_without_a_setting_is_not_tried() -> None:
    first = causes.Cause(name="calibration data", stage="quantize", evidence="255", advice="scale it", confidence=0.9)
    second = causes.Cause(name="other", stage="quantize", evidence="", advice="", setting="a.b=1", confidence=0.1)
    trial = why.attempt(None, [first, second], None)
    assert trial.report is None and "likeliest cause, calibration data" in trial.reason
    assert why.attempt(None, [], None) == why.Trial(reason="no cause was found")


def test_layers_by_which_the_outputs_gain_come_first_and_the_verdict_says_how_much() -> None:
    gains = {"v3": 0.1, "v7": 4.2, "v11": -0.3}
    rows = [record(name, own=own) for name, own in (("v3", 3.0), ("v7", 7.0), ("v11", 11.0), ("v12", 12.0))]
    rows = [replace(row, extra={**row.extra, "gain_db": gains.get(row.name)}) for row in rows]
    seen = evidence("quantize", *rows)
    sensitive = list(quantize_causes.sensitive_layers(seen))
    assert [cause.layer for cause in sensitive] == ["v7", "v3", "v11"] and "gain 4.2 dB" in sensitive[0].evidence
    assert why.verdict(seen, sensitive)[-1] == "v7 alone in float changes the SQNR of the outputs by +4.2 dB"
    report = seen.reports["quantize"]
    assert [row.name for row in report.sorted("gain")] == ["v7", "v3", "v11", "v12"]
