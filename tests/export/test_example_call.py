"""Arguments and results of every shape get flat names, and a call can be repeated from named arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerline.export.example_call import call, check_range, refuse_training
from layerline.pipeline.errors import ConfigError, StageError, TaskError

X = torch.arange(6.0).reshape(2, 3)


def module(forward: Callable[..., Any]) -> nn.Module:
    out = nn.Module()
    out.forward = forward
    return out


def test_names_of_nested_arguments() -> None:
    def forward(x: Tensor, batch: dict[str, Any], flag: Tensor | None = None, n: int = 2, *, scale: Tensor) -> Tensor:
        return x * n * scale + batch["pair"][1]

    found = call(module(forward), (X, {"mask": X > 1, "pair": [X, X + 1]}), {"scale": torch.tensor(2.0), "n": 3})
    assert [*found.feed] == ["x", "batch_mask", "batch_pair_0", "batch_pair_1", "scale"]
    assert found.fixed == {"n": 3}
    assert found.feed["scale"].shape == () and found.feed["batch_mask"].dtype == np.bool_
    assert found.outputs == ("output",)
    fed = {k: v + 1 if v.dtype == np.float32 else v for k, v in found.feed.items()}
    np.testing.assert_array_equal(found.run(fed)["output"], (fed["x"] * 3 * 3 + fed["batch_pair_1"]))


def test_keywords_are_put_in_the_order_of_the_parameters() -> None:
    found = call(module(lambda a, b: a - b), (), {"b": X, "a": X + 1})
    assert [*found.feed] == ["a", "b"]
    assert (found.run(found.feed)["output"] == 1.0).all()


def test_collected_arguments_have_their_own_names() -> None:
    found = call(module(lambda *xs, **more: xs[0] + xs[1] + more["z"]), (X, X + 1), {"z": X + 2})
    assert [*found.feed] == ["xs_0", "xs_1", "z"]
    np.testing.assert_array_equal(found.run(found.feed)["output"], (3 * X + 3).numpy())


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor | None, ...]


@pytest.mark.parametrize(
    ("returns", "names"),
    [
        (lambda x: x, ("output",)),
        (lambda x: (x, None, x + 1), ("output_0", "output_2")),
        (lambda x: {"a": x, "b": [x, x]}, ("a", "b_0", "b_1")),
        (lambda x: Result(x, (x, None)), ("logits", "hidden_0")),
        (lambda x: {"x": x, "n": 3}, ("x_out",)),
    ],
)
def test_names_of_results(returns: Callable[[Tensor], Any], names: tuple[str, ...]) -> None:
    assert call(module(lambda x: returns(x)), (X,), {}).outputs == names


@pytest.mark.parametrize("value", [3, 2.5, True, "text", 1j, torch.Size((2,))])
def test_numbers_beside_tensors_are_left_out_and_told(value: Any) -> None:
    found = call(module(lambda x: {"y": x * 2, "n": value}), (X,), {})
    assert found.outputs == ("y",) and list(found.left_out.values()) == [value[0] if value == (2,) else value]


def test_a_parameter_may_come_out() -> None:
    net = nn.Linear(3, 3)
    net.forward = lambda x: (x, net.weight, net.bias[:1])  # type: ignore[method-assign]
    assert [*call(net, (X,), {}).results] == ["output_0", "output_1", "output_2"]


@pytest.mark.parametrize(
    ("forward", "args", "where"),
    [
        (lambda x, x_a: x["a"] + x_a, ({"a": X}, X), "input x_a"),
        (lambda x: x["b_0"], ({"b": [X], "b_0": X},), "input x_b_0"),
        (lambda x: {"a": [x], "a_0": x}, (X,), "output a_0"),
        (lambda x: {"x": x, "x_out": x}, (X,), "output x_out"),
    ],
)
def test_two_tensors_of_one_name_are_refused(forward: Callable[..., Any], args: tuple[Any, ...], where: str) -> None:
    with pytest.raises(TaskError, match="would both be called") as error:
        call(module(forward), args, {})
    assert error.value.where == where


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_no_runtime_passes_are_named(kind: torch.dtype) -> None:
    for forward, x, where in ((lambda x: x.to(kind), X, "output output"), (lambda x: x.float(), X.to(kind), "input x")):
        with pytest.raises(StageError, match=str(kind).removeprefix("torch.")) as error:
            call(module(forward), (x,), {})
        assert error.value.where == where
    with pytest.raises(StageError, match="sparse_coo"):
        call(module(lambda x: x.to_sparse()), (X,), {})


def test_half_inputs_of_float32_parameters_are_explained() -> None:
    with pytest.raises(TaskError, match="dtype") as error:
        call(nn.Linear(3, 2), (X.half(),), {})
    assert "give float32 inputs" in error.value.hint


@pytest.mark.parametrize("result", [None, 3, (None, "a")])
def test_no_tensor_comes_out(result: Any) -> None:
    with pytest.raises(StageError, match="returns no tensor"):
        call(module(lambda x: result), (X,), {})


def test_complex_numbers_are_pairs() -> None:
    found = call(module(lambda x: x.conj() * 2), (torch.complex(X, X + 1),), {})
    np.testing.assert_array_equal(found.feed["x"], torch.stack([X, X + 1], -1).numpy())
    np.testing.assert_array_equal(found.run(found.feed)["output"], 2 * torch.stack([X, -X - 1], -1).numpy())
    assert found.complex_inputs == ["x"]


def test_one_tensor_given_twice_becomes_two() -> None:
    args, _ = call(module(lambda a, b: a + b), (X, X), {}).arguments({"a": X.numpy(), "b": X.numpy()})
    assert args[0].data_ptr() != args[1].data_ptr()


def test_mistakes_are_named() -> None:
    with pytest.raises(TaskError, match="do not fit"):
        call(module(lambda a: a), (X, X), {})
    with pytest.raises(TaskError, match="raised RuntimeError"):
        call(module(lambda a: a @ a), (X,), {})
    with pytest.raises(TaskError, match="no tensor"):
        call(module(lambda a: a), (3,), {})
    with pytest.raises(StageError, match="returns a set") as error:
        call(module(lambda a: {"cache": {1}}), (X,), {})
    assert error.value.where == "output cache"


def test_a_module_that_stays_in_training_mode_is_named() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(0.5))).eval()
    refuse_training(net)
    net[1][0].training = True
    with pytest.raises(StageError, match="Dropout is still in training mode") as error:
        refuse_training(net)
    assert error.value.where == "module 1.0"


@pytest.mark.parametrize(
    ("name", "low", "high", "told"),
    [
        ("y", 0, 1, "unknown input"),
        ("x", 0, 1, "float32"),
        ("ids", 1, 9, "holds 0 to 5"),
        ("ids", 0, 4, "holds 0 to 5"),
    ],
)
def test_ranges_are_checked_against_the_example(name: str, low: int, high: int, told: str) -> None:
    found = call(module(lambda x, ids: x), (X, torch.arange(6)), {})
    check_range(found, "ids", 0, 5)
    with pytest.raises(ConfigError, match=told):
        check_range(found, name, low, high)
