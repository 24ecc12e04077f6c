"""Metrics by slice and by class, and flipped answers, on answers written by hand."""

import numpy as np

from layerline.parity.evaluate import Predictions
from layerline.parity.paired_metric import intervals
from layerline.parity.slice_metrics import by_slice, flipped
from layerline.pipeline.config.budgets import Budget
from layerline.pipeline.inputs.metric import accuracy

TARGETS = np.array([0, 0, 0, 0, 1, 1, 1, 2])
BEFORE = np.array([0, 0, 0, 1, 1, 1, 1, 2])  # sample 3 is wrong
AFTER = np.array([0, 0, 0, 0, 1, 1, 0, 0])  # 3 is right now; 6 and 7 are wrong


def predictions(slices=None):
    outputs = {"float": np.eye(3)[BEFORE], "result": np.eye(3)[AFTER]}
    return Predictions(outputs=outputs, targets=TARGETS, slices=slices)


def test_classes_are_the_slices_and_those_that_lost_most_come_first():
    rows, why = by_slice(accuracy, predictions(), {})
    assert why == "" and [(r["slice"], r["samples"]) for r in rows] == [(2, 1), (1, 3), (0, 4)]
    assert [(r["float"], r["converted"]) for r in rows] == [(1.0, 0.0), (1.0, 2 / 3), (0.75, 1.0)]


def test_a_column_of_slices_comes_before_classes_and_a_rise_may_be_the_loss():
    def mistakes(outputs, targets):
        return {"mistakes": float((outputs.argmax(1) != targets).sum())}

    slices = np.array(["day", "day", "day", "day", "night", "night", "night", "night"])
    rows, _ = by_slice(mistakes, predictions(slices), {"mistakes": Budget(rise=1.0)})
    assert [(r["slice"], r["change"]) for r in rows] == [("night", 2.0), ("day", -1.0)]


def test_slices_for_which_the_metric_is_not_defined_are_counted():
    def two_classes(outputs, targets):
        return 1.0 if len(set(targets.tolist())) > 1 else "none"

    rows, why = by_slice(two_classes, predictions(np.array([0, 0, 0, 0, 0, 1, 1, 1])), {})
    assert len(rows) == 2 and why == ""
    rows, why = by_slice(two_classes, predictions(), {})
    assert rows == [] and why == "metric() gives nothing for 3 of 3 slices"


def test_the_samples_whose_answer_flipped_have_their_number_wrong_ones_first():
    both = predictions(np.array(list("aabbaabb")))
    totals = (accuracy(both.outputs["float"], TARGETS), accuracy(both.outputs["result"], TARGETS))
    certainty, _ = intervals(accuracy, both.outputs["float"], both.outputs["result"], TARGETS, totals)
    rows, why = flipped(certainty, both)
    assert why == "" and [(r["sample"], r["became"], r["slice"]) for r in rows] == [
        (6, "wrong", "b"), (7, "wrong", "b"), (3, "right", "b"),
    ]  # fmt: skip
