"""The metric sees the whole evaluation data of every model, in order and without filler."""

import numpy as np
import pytest

from layerline.calib.samples import Batch
from layerline.parity.evaluate import predict
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.metric import accuracy, score


class Doubling:
    inputs = ("x",)

    def __init__(self, *outputs):
        self.outputs = outputs

    def run(self, feed):
        return {name: (i + 2) * feed["x"] for i, name in enumerate(self.outputs)}


def batch(*values, target=None, filler=0):
    array = np.array(values, np.float32)
    return Batch({"x": array}, None if target is None else np.array(target), len(array) - filler, filler)


def test_outputs_are_joined_in_order_and_filler_is_dropped():
    found = predict({"a": Doubling("y")}, [batch(1, 2, target=[0, 1]), batch(3, 9, target=[2], filler=1)])
    assert found.outputs["a"].tolist() == [2, 4, 6] and found.targets.tolist() == [0, 1, 2]


def test_several_models_and_outputs():
    found = predict({"a": Doubling("y"), "b": Doubling("y", "z")}, [batch(1, 2)])
    assert isinstance(found.outputs["b"], tuple) and [o.tolist() for o in found.outputs["b"]] == [[2, 4], [3, 6]]
    assert found.targets is None


def test_outputs_that_cannot_be_joined_are_told_with_their_shapes():
    batches = [Batch({"x": np.zeros((1, n), np.float32)}, None, 1) for n in (2, 3)]
    with pytest.raises(TaskError, match=r"outputs of different batches cannot be joined: shapes \(1, 2\), \(1, 3\)"):
        predict({"a": Doubling("y")}, batches)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), {"f1": 0.5}, {"f1": np.float64(0.5)}])
def test_a_metric_gives_a_number_or_numbers_by_name(value):
    found = score(lambda outputs, targets: value, np.zeros(1), np.zeros(1))
    assert found == {"f1" if isinstance(value, dict) else "metric": 0.5}


@pytest.mark.parametrize("value", [None, "good", {"f1": None}, np.zeros(2)])
def test_anything_else_is_the_users_mistake(value):
    with pytest.raises(TaskError, match=r"metric\(\) gave"):
        score(lambda outputs, targets: value, np.zeros(1), np.zeros(1))


def test_accuracy_finds_the_class_axis():
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, np.array([1, 0, 0])) == {"accuracy": pytest.approx(2 / 3)}
    assert accuracy((scores, scores), np.array([1, 0, 1])) == {"accuracy": 1.0}
    pixels = np.zeros((2, 3, 4, 4))
    pixels[:, 1] = 1
    assert accuracy(pixels, np.ones((2, 4, 4), int)) == {"accuracy": 1.0}
    assert accuracy(np.moveaxis(pixels, 1, -1), np.ones((2, 4, 4), int)) == {"accuracy": 1.0}
    for wrong in ([1, 0, 2], [-1, 0, 1]):
        with pytest.raises(TaskError, match="2 classes: some target is none of them"):
            accuracy(scores, np.array(wrong))


@pytest.mark.parametrize(("outputs", "targets"), [(np.zeros((3, 2)), np.zeros(3)), (np.zeros(3), np.zeros(3, int))])
def test_accuracy_of_what_is_no_classifier_is_refused(outputs, targets):
    with pytest.raises(TaskError, match=r"no accuracy|do not make an accuracy"):
        accuracy(outputs, targets)
