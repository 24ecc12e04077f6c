"""A backend that someone wrote, beside ONNX Runtime: what it computes, and what it does wrong."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.openvino import OpenVino
from layerline.compare.backend_compare import BackendSession, compare_on
from layerline.pipeline.errors import StageError
from tests.backends import models
from tests.backends.models import I64, F, model, node

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


class Own:
    """ONNX Runtime behind a backend's contract; `change` alters the arrays, knowing which taps are read."""

    name = "own"

    def __init__(self, change=lambda arrays, taps: arrays, gives=lambda name: True):
        self.change, self.gives, self.opened = change, gives, []

    def unavailable_reason(self):
        return None

    def open(self, source, taps=()):
        taps = [tap for tap in taps if self.gives(tap)]
        self.opened.append(taps)
        return OwnSession(self, OnnxRuntime().open(source, taps), taps)


class OwnSession:
    def __init__(self, backend, session, taps):
        self.backend, self.session, self.taps = backend, session, taps
        self.inputs, self.outputs = session.inputs, session.outputs

    def run(self, feed):
        return self.backend.change(self.session.run(feed), self.taps)


def compared(tmp_path, backend, proto=None, feeds=({"x": X},)):
    path = tmp_path / "model.onnx"
    onnx.save(proto or models.conv(), str(path))
    rows, notes = compare_on(backend, path, BackendSession(backend, path), feeds)
    return {row.name: row for row in rows}, " ".join(notes)


def scaled(name, factor):
    def change(arrays, taps):
        return {n: a * np.float32(factor) if n == name else a for n, a in arrays.items()}

    return change


def test_every_value_has_a_row_in_the_order_of_the_graph(tmp_path) -> None:
    backend = Own(scaled("c", 1.1))
    rows, notes = compared(tmp_path, backend)
    assert list(rows) == ["c", "y"] and backend.opened == [[], ["c"]]
    assert rows["c"].rel_l2 == pytest.approx(0.1, rel=1e-4) and rows["c"].sqnr_db == pytest.approx(20, abs=0.01)
    assert (rows["c"].op, rows["c"].module, rows["c"].shape) == ("Conv", "net.conv", ("batch", 4, 6, 6))
    assert rows["y"].rel_l2 == 0 and rows["y"].passed
    assert "second session" in notes


def test_a_quantised_value_has_one_row(tmp_path) -> None:
    rows, _ = compared(tmp_path, Own(), models.quantised())
    # An input has no row of its own, so what it is dequantised to stays.
    assert list(rows) == ["x_dq", "c", "r", "p", "y"]
    rows, _ = compared(tmp_path, Own(gives=lambda name: name != "p"), models.quantised())
    assert list(rows) == ["x_dq", "c", "r", "p_dq", "y"]


def test_types_are_those_of_the_file_though_half_is_emulated(tmp_path) -> None:
    rows, _ = compared(tmp_path, Own(), models.half(), [{"x": X[0, 0, :, :4]}])
    assert {name: row.dtype for name, row in rows.items()} == {"h": "float16", "m": "float16", "y": "float32"}


def test_without_inner_values_the_outputs_are_compared(tmp_path) -> None:
    rows, notes = compared(tmp_path, Own(scaled("y", 2), gives=lambda name: False))
    assert list(rows) == ["y"] and rows["y"].rel_l2 == pytest.approx(1)
    assert "own gives no inner values: only the outputs were compared" in notes


def test_inner_values_that_change_the_outputs_are_not_shown(tmp_path) -> None:
    def wrong_with(bad):
        def change(arrays, taps):
            return {n: a * 0 if bad in taps and n != bad else a for n, a in arrays.items()}

        return change

    proto = models.quantised()
    rows, notes = compared(tmp_path, Own(wrong_with("c")), proto)
    # c lies between a convolution and the Relu fused into it: without it the outputs stay.
    assert "c" not in rows and rows["r"].rel_l2 == rows["y"].rel_l2 == 0 and "own gives 8 of 9" in notes
    rows, notes = compared(tmp_path, Own(wrong_with("r")), proto)
    assert list(rows) == ["y"] and "own computes other outputs where inner values are read" in notes


def test_a_session_that_refuses_taps_leaves_the_outputs(tmp_path) -> None:
    class Refusing(Own):
        def open(self, source, taps=()):
            if taps:
                raise NotImplementedError("no taps")
            return super().open(source)

    rows, notes = compared(tmp_path, Refusing())
    assert list(rows) == ["y"] and "backend own: NotImplementedError: no taps" in notes


def test_what_the_backend_raises_or_leaves_out_names_it(tmp_path) -> None:
    def fail(arrays, taps):
        raise ZeroDivisionError("of its own")

    with pytest.raises(StageError, match="backend own: ZeroDivisionError: of its own"):
        compared(tmp_path, Own(fail))
    with pytest.raises(StageError, match="backend own: it gives no array for y"):
        compared(tmp_path, Own(lambda arrays, taps: {}))
    with pytest.raises(StageError, match="backend own: AttributeError"):
        compared(tmp_path, type("Own", (), {"name": "own"})())


def test_tensors_of_a_framework_are_taken_for_arrays(tmp_path) -> None:
    rows, _ = compared(tmp_path, Own(lambda arrays, taps: {n: torch.from_numpy(a) for n, a in arrays.items()}))
    assert list(rows) == ["c", "y"] and rows["y"].rel_l2 == 0


def test_another_shape_and_nan_do_not_pass(tmp_path) -> None:
    rows, _ = compared(tmp_path, Own(lambda arrays, taps: {n: a[:1] for n, a in arrays.items()}))
    assert rows["y"].max_abs == np.inf and rows["y"].extra["mismatch"] == "shape (2, 4, 6, 6) against (1, 4, 6, 6)"
    rows, _ = compared(tmp_path, Own(lambda arrays, taps: {n: a * np.nan for n, a in arrays.items()}))
    assert rows["y"].one_sided == 2 * 4 * 6 * 6 and not rows["y"].passed


def test_indices_are_measured_on_what_they_point_at(tmp_path) -> None:
    proto = model([node("ArgMax", ["x"], ["i"], axis=1, keepdims=0)], [("x", F, ["n", 3])], [("i", I64, ["n"])])
    feed = {"x": np.array([[1, 1.0001, 0], [4, 2, 3]], np.float32)}
    near = Own(lambda arrays, taps: {"i": np.array([0, 0])})
    rows, _ = compared(tmp_path, near, proto, [feed])
    assert rows["i"].max_abs == pytest.approx(1e-4, rel=0.01)
    far = Own(lambda arrays, taps: {"i": np.array([2, 0])})
    assert compared(tmp_path, far, proto, [feed])[0]["i"].max_abs == pytest.approx(1.0001)


def chooser(indices="i", ordered=1):
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("TopK", ["r", "k"], ["v", "i"], axis=1, sorted=ordered, name="best"),
        node("GatherElements", ["e", "i"], ["g"], axis=1),
        node("Neg", ["g"], ["y"]),
        node("Neg", ["v"], ["z"]),
    ]
    outputs = [("y", F, ["n", 2]), ("z", F, ["n", 2])]
    if indices:
        outputs.append(("i", I64, ["n", 2]))
    return model(nodes, [("x", F, ["n", 3]), ("e", F, ["n", 3])], outputs, {"k": np.array([2])})


TIED = {"x": np.array([[1, 1, 0]], np.float32), "e": np.array([[5, -7, 9]], np.float32)}
CLEAR = {"x": np.array([[2, 1, 0]], np.float32), "e": np.array([[5, -7, 9]], np.float32)}


def swapping(arrays, taps):
    """The other order of two equal elements, and what is computed from it."""
    if float(arrays["z"][0, 0]) != float(arrays["z"][0, 1]):
        return arrays
    return {name: a[:, ::-1] if name in ("i", "g", "y") else a for name, a in arrays.items()}


@pytest.mark.parametrize("indices", ["i", ""], ids=["indices are an output", "indices are an inner value"])
def test_values_behind_another_choice_of_equal_elements_are_no_error(tmp_path, indices) -> None:
    rows, _ = compared(tmp_path, Own(swapping), chooser(indices), [TIED])
    for name in ("g", "y"):
        assert rows[name].extra == {"size": "follows another choice of TopK best"} and rows[name].rel_l2 is None
    assert rows["i"].max_abs == rows["v"].max_abs == rows["z"].max_abs == 0


def test_probes_without_another_choice_are_measured(tmp_path) -> None:
    def wrong(arrays, taps):
        return scaled("y", 2)(swapping(arrays, taps), taps)

    rows, _ = compared(tmp_path, Own(wrong), chooser(), [TIED, CLEAR])
    assert rows["y"].rel_l2 == pytest.approx(1) and rows["y"].max_abs == 7
    assert rows["y"].extra["size"] == "follows another choice of TopK best in 1 of 2 probes (left out)"
    rows, _ = compared(tmp_path, Own(wrong), chooser(), [CLEAR])
    assert rows["y"].rel_l2 == pytest.approx(1) and not rows["y"].extra


def test_a_choice_that_a_backend_does_not_give_is_named(tmp_path) -> None:
    rows, _ = compared(tmp_path, Own(swapping, gives=lambda name: name != "i"), chooser(""), [TIED])
    assert rows["y"].extra["size"] == "may follow another choice of TopK best, which the runtime does not give"
    assert rows["y"].max_abs == 12 and not rows["z"].extra


def test_a_wrong_choice_shows_at_its_indices(tmp_path) -> None:
    def wrong(arrays, taps):
        return {n: np.array([[2, 1]]) if n == "i" else a for n, a in arrays.items()}

    rows, _ = compared(tmp_path, Own(wrong), chooser(), [CLEAR])
    # Index 2 points at 0 where the largest element is 2.
    assert rows["i"].max_abs == 2 and "follows" in str(rows["y"].extra["size"])


def test_values_of_a_topk_in_no_order_follow_its_choice(tmp_path) -> None:
    def turned(arrays, taps):
        return {name: a[:, ::-1] if name != "r" else a for name, a in arrays.items()}

    rows, _ = compared(tmp_path, Own(turned), chooser(ordered=0), [CLEAR])
    assert rows["i"].max_abs == 0 and {"size"} == rows["v"].extra.keys() == rows["z"].extra.keys()


def test_other_boxes_of_a_suppression_are_no_error(tmp_path) -> None:
    nodes = [
        node("NonMaxSuppression", ["b", "s", "k", "t"], ["i"], name="nms"),
        node("Gather", ["i", "two"], ["y"], axis=1),
    ]
    constants = {"k": np.array([2]), "t": np.array([0.5], np.float32), "two": np.array(2)}
    proto = model(nodes, [("b", F, [1, 3, 4]), ("s", F, [1, 1, 3])], [("y", I64, ["m"])], constants)
    boxes = np.array([[[0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 6, 6]]], np.float32)
    feed = {"b": boxes, "s": np.array([[[0.9, 0.9, 0.5]]], np.float32)}
    other = Own(lambda arrays, taps: {"y": np.array([1]), "i": np.array([[0, 0, 1]])})
    rows, _ = compared(tmp_path, other, proto, [feed])
    text = "follows another choice of NonMaxSuppression nms"
    assert rows["i"].extra["size"] == rows["y"].extra["size"] == text and rows["y"].rel_l2 is None


def test_random_values_are_not_measured(tmp_path) -> None:
    proto = model([node("RandomNormalLike", ["x"], ["y"])], [("x", F, [2])], [("y", F, [2])])
    rows, _ = compared(tmp_path, Own(), proto, [{"x": np.ones(2, np.float32)}])
    assert rows["y"].extra == {"nondeterministic": "RandomNormalLike"} and rows["y"].rel_l2 is None


def test_openvino_computes_an_int8_model_with_its_inner_values(tmp_path) -> None:
    if reason := OpenVino().unavailable_reason():
        pytest.skip(reason)
    rows, _ = compared(tmp_path, OpenVino(), models.quantised())
    assert {"r", "p", "y"} <= rows.keys()
    assert all(row.rel_l2 < 0.02 for row in rows.values()), {n: r.rel_l2 for n, r in rows.items()}
