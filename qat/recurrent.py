"""LSTM, GRU and RNN in torch, with gradients, by the functions behind torch's own modules. Their weights hold the gates
in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerline.qat.windows import Attrs


def lstm(
    attrs: Attrs, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    hidden: Tensor | None = None, cell: Tensor | None = None, peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """ONNX orders the gates input, output, forget, cell; torch input, forget, cell, output."""
    if peepholes is not None or attrs.get("input_forget", 0):
        raise NotImplementedError("LSTM with peepholes or coupled gates")
    _check(attrs, x, r, lengths, ("Sigmoid", "Tanh", "Tanh"))
    states = [_start(x, r, hidden), _start(x, r, cell)]
    return _in_time(torch.lstm, attrs, x, states, _parameters(w, r, bias, (0, 2, 3, 1)), r)


def gru(
    attrs: Attrs, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """ONNX orders the gates update, reset, hidden; torch reset, update, hidden. Torch has no function for ONNX's
    default GRU, whose reset gate comes before the product with the state."""
    _check(attrs, x, r, lengths, ("Sigmoid", "Tanh"))
    if not attrs.get("linear_before_reset", 0):
        raise NotImplementedError("a GRU whose reset gate comes before the product with the state")
    return _in_time(torch.gru, attrs, x, _start(x, r, hidden), _parameters(w, r, bias, (1, 0, 2)), r)


def rnn(
    attrs: Attrs, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A plain recurrent layer with Tanh or Relu."""
    function, activation = torch.rnn_tanh, "Tanh"
    if [name.lower() for name in attrs.get("activations") or ()] == ["relu"] * len(r):
        function, activation = torch.rnn_relu, "Relu"
    _check(attrs, x, r, lengths, (activation,))
    return _in_time(function, attrs, x, _start(x, r, hidden), _parameters(w, r, bias, (0,)), r)


def _check(attrs: Attrs, x: Tensor, r: Tensor, lengths: Tensor | None, activations: Sequence[str]) -> None:
    """Refuses what torch's functions lack."""
    named = [name.lower() for name in attrs.get("activations") or [*activations] * len(r)]
    if named != [name.lower() for name in activations] * len(r):
        raise NotImplementedError(f"other activations than {', '.join(activations)}")
    if attrs.get("layout", 0) or attrs.get("clip") is not None:
        raise NotImplementedError("layout 1, or clip")
    if lengths is not None and bool((lengths != len(x)).any()):
        raise NotImplementedError("sequences of different lengths")


def _start(x: Tensor, r: Tensor, state: Tensor | None) -> Tensor:
    """The first state, (directions, batch, size)."""
    if state is not None:
        return state
    return x.new_zeros(len(r), x.shape[1], r.shape[2])


def _parameters(w: Tensor, r: Tensor, bias: Tensor | None, order: Sequence[int]) -> list[Tensor]:
    """By direction: the weights of the input and of the state and their biases, with torch's order of gates."""
    # ONNX has the biases of the input and of the state side by side, or none.
    if bias is None:
        bias = w.new_zeros(len(w), 2 * w.shape[1])
    parameters: list[Tensor] = []
    for number in range(len(w)):
        for tensor in (w[number], r[number], *bias[number].chunk(2)):
            gates = tensor.chunk(len(order))
            parameters.append(torch.cat([gates[place] for place in order]))
    return parameters


def _in_time(
    function: Callable[..., Any], attrs: Attrs, x: Tensor, start: Any, parameters: list[Tensor], r: Tensor
) -> tuple[Tensor, ...]:
    """Y as (steps, directions, batch, size), and the last states."""
    backwards = attrs.get("direction") == "reverse"
    if backwards:
        x = x.flip(0)
    # With biases, one layer, no dropout, with gradients, and the time in front of the batch.
    y, *states = function(x, start, parameters, True, 1, 0.0, True, len(r) == 2, False)
    y = y.reshape(*x.shape[:2], len(r), r.shape[2]).transpose(1, 2)
    if backwards:
        y = y.flip(0)
    return (y, *states)
