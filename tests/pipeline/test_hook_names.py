"""Functions that are nearly called like a hook are told; helpers that something calls are not."""

from __future__ import annotations

import pytest

from layerline.pipeline.run.check import near_misses

REST = "def model(): pass\ndef train_data(): pass\n"


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("metrics", "metric"),
        ("Metric", "metric"),
        ("mertic", "metric"),
        ("eval_dat", "eval_data"),
        ("evaldata", "eval_data"),
        ("val_data", "eval_data"),
        ("validation_data", "eval_data"),
        ("calibration_data", "calib_data"),
        ("calib", "calib_data"),
        ("example_input", "example_inputs"),
        ("losses", "loss"),
        ("loss_fn", "loss"),
    ],
)
def test_a_near_miss_is_told_with_its_line(name: str, hook: str) -> None:
    assert list(near_misses(f"{REST}def {name}(): pass\n")) == [(3, name, hook)]


@pytest.mark.parametrize("value", ["lambda x, y: 0.0", "train_data"])
def test_a_function_that_is_assigned_is_one_too(value: str) -> None:
    assert list(near_misses(f"{REST}metrics = {value}\n")) == [(3, "metrics", "metric")]


@pytest.mark.parametrize("name", ["mdel", "modle", "get_model", "make_model"])
def test_a_missing_model_is_found_under_another_name(name: str) -> None:
    assert list(near_misses(f"def {name}(): pass\ndef train_data(): pass\n")) == [(1, name, "model")]


@pytest.mark.parametrize(
    "code",
    [
        f"{REST}def metrics(): pass\ndef metric(): return metrics()\n",  # a helper
        f"{REST}def metrics(): pass\nHELPERS = [metrics]\n",
        f"{REST}def metrics(): pass\nfrom other import metric\n",  # the hook is there
        f"{REST}def metrics(): pass\nmetric = make()\n",
        f"{REST}def _metric(): pass\n",
        f"{REST}def images(): pass\ndef resize(x): pass\ndef train_one_epoch(): pass\n",
        f"{REST}class Metrics: pass\n",
        f"{REST}def eval_data(): pass\ndef val_data(): pass\n",  # not calib_data, which is less like it
        f"{REST}metrics = 5\n",
        "def metric(:",  # no Python: told when it is imported
    ],
)
def test_what_is_used_or_named_otherwise_is_left_alone(code: str) -> None:
    assert list(near_misses(code)) == []


def test_a_file_in_an_encoding_of_its_own() -> None:
    code = b"# -*- coding: latin-1 -*-\n# caf\xe9\ndef model(): pass\ndef metrics(): pass\n"
    assert list(near_misses(code)) == [(4, "metrics", "metric")]
