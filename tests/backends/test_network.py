"""Precision of layers, from what their operands were stored in."""

from __future__ import annotations

from layerline.backends.tensorrt.network import Layer, Tensor, compute_precisions, settle


def layer(name: str, kind: str, reads: tuple[str, ...] = (), dtype: str = "float32") -> Layer:
    outputs = (Tensor(f"{name}_out", dtype, ()),)
    return Layer(name=name, type=kind, precision=dtype, reads=reads, outputs=outputs, node=name)


def product(data: str, weights: str, stored: str = "int8", between: str = "", kind: str = "CONVOLUTION") -> str:
    """Precision of a product whose operands come from `data` and `weights`, "dq" or "float", through `between`."""
    layers = [layer("stored", "CONSTANT", dtype=stored), layer("dq", "DEQUANTIZE", ("stored_out",))]
    layers.append(layer("float", "CONSTANT"))
    reads = (f"{data}_out", f"{weights}_out")
    if between:
        layers.append(layer("moved", between, (reads[1],)))
        reads = (reads[0], "moved_out")
    return settle([*layers, layer("product", kind, reads)])[-1].precision


def test_both_operands_decide() -> None:
    assert product("dq", "dq") == "int8"
    assert product("dq", "float") == product("float", "dq") == product("float", "float") == "float32"
    assert product("dq", "dq", kind="ELEMENTWISE") == "float32"


def test_other_stored_types() -> None:
    assert product("dq", "dq", stored="float8e4m3fn", kind="MATRIX_MULTIPLY") == "float8e4m3fn"


def test_layers_that_only_move_elements_are_looked_through() -> None:
    assert product("dq", "dq", between="SHUFFLE") == product("dq", "dq", between="UNSQUEEZE") == "int8"
    assert product("dq", "dq", between="CAST") == product("dq", "dq", between="ACTIVATION") == "float32"


def test_counts_leave_other_layers_out() -> None:
    layers = [layer("a", "CONVOLUTION"), layer("b", "MATRIX_MULTIPLY"), layer("c", "ACTIVATION")]
    assert compute_precisions(layers) == {"float32": 2}
