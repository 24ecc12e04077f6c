"""Small models in ONNX's text form, and what every test of a rule asks: what fired, why not, are the numbers right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from layerline.backends.light import Model
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.fusion.fuse import Rewritten, fuse, select
from layerline.graph.fusion.rule import FusionRule
from layerline.graph.fusion.rules import RULES
from tests.forms import proto

Feed = dict[str, Any]


def parse(signature: str, body: str, opset: int = 17, **tensors: Any) -> onnx.ModelProto:
    """A model of the given `(inputs) => (outputs)`; keyword arguments become initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {signature} {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(t), n) for n, t in tensors.items())
    return model


def run(model: Model, feed: Feed) -> dict[str, Any]:
    """The model's outputs as written, without the runtime's own optimisations."""
    return OnnxRuntime().open(proto(model).SerializeToString()).run(feed)


def only(*names: str) -> tuple[FusionRule, ...]:
    """Just these rules (and folding, which most of them need)."""
    return select({r.name: r.name in (*names, "constants", "fold", "dead-code") for r in RULES})


def prove(
    model: onnx.ModelProto, *feeds: Feed, rules: Sequence[FusionRule] = RULES, undone: bool = False, **options: Any
) -> Rewritten:
    """Fuses, and insists on what always holds: same outputs by the same names, every proof passed, a valid model."""
    done = fuse(model, feeds, rules=rules, **options)
    assert [o.name for o in proto(done.model).graph.output] == [o.name for o in model.graph.output]
    assert undone or not done.undone, done.undone
    assert all(p.passed for p in done.proofs)
    if valid(model):
        onnx.checker.check_model(proto(done.model))
    for feed in feeds:
        before, after = run(model, feed), run(done.model, feed)
        for name, value in before.items():
            assert after[name].shape == value.shape, name
            assert after[name].dtype == value.dtype, name
            np.testing.assert_allclose(after[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    return done


def valid(model: onnx.ModelProto) -> bool:
    """Whether onnx's own full check passes; it refuses outputs of unknown rank, which runtimes take."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def fired(done: Rewritten) -> set[str]:
    """Names of the rules that fired, apart from turning Constant nodes into initializers."""
    return {f.site.rule for f in done.firings} - {"constants"}


def reason(done: Rewritten, rule: str) -> str:
    """Why a rule declined, at the first place where it did."""
    return next(reason for site, reason in done.declines.items() if site.rule == rule)


def ops(model: Model) -> list[str]:
    """Operators of the main graph in order."""
    return [n.op_type for n in proto(model).graph.node]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def statistics(channels: int, seed: int = 1) -> dict[str, Any]:
    """gamma, beta, mean and var of a trained BatchNormalization."""
    rng = np.random.default_rng(seed)
    draw = {k: rng.standard_normal(channels).astype(np.float32) for k in ("gamma", "beta", "mean")}
    return draw | {"var": rng.uniform(0.1, 2.0, channels).astype(np.float32)}
