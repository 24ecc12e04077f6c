"""Collects the messages of TensorRT's parser and builder, and turns them into errors with node and module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerline.backends.tensorrt.network import Layer
from layerline.graph.analysis.ir_queries import first_output, model_nodes
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError

# Messages that come on every machine without a driver, or are about the logger: nobody can act on them.
_NOISE = re.compile(
    r"catchCudaError|logger passed into|Thread context has not been set|HardwareCompatibilityLevel|"
    r"While parsing node number|^--- (Begin|End) node|^Node name:|Make sure (input|output) \S+ has Int64 binding"
)
_PLACE = re.compile(r"^\[?\w+\.(?:cpp|hpp|h)(?:::\w+)*(?:::?\d+)?[\]:]+\s*|^In function \w+:\s*|^\[\d+\]\s*")
_INCONSISTENT = re.compile(r"Profile k(MIN|OPT|MAX) values are not self-consistent")


class Messages:
    """Everything that TensorRT logs, except at severity VERBOSE, by an ILogger of the module `trt`."""

    def __init__(self, trt: Any) -> None:
        logged: list[tuple[str, str]] = []

        class Logger(trt.ILogger):  # type: ignore[misc]  # the base is only known when TensorRT is
            def log(self, severity: Any, text: str) -> None:
                if severity.name != "VERBOSE":
                    logged.append((severity.name, text))

        self._logged = logged
        self.logger = Logger()

    def clear(self) -> None:
        self._logged.clear()

    def of(self, *severities: str) -> Iterator[str]:
        """Texts of these severities in order, without those that say nothing about the model."""
        for severity, text in self._logged:
            if severity in severities and not _NOISE.search(text):
                yield text

    @property
    def errors(self) -> list[str]:
        """The errors about the model or, if there are none, all errors."""
        about_model = list(self.of("ERROR", "INTERNAL_ERROR"))
        if about_model:
            return about_model
        return [text for severity, text in self._logged if severity in ("ERROR", "INTERNAL_ERROR")]


def parse_failed(errors: Sequence[Any], modules: Mapping[str, str], path: Path) -> StageError:
    """An error about the first node that the parser refuses, from TensorRT's ParserError objects."""
    if not errors:
        return StageError("TensorRT's parser can't read the file", where="model.onnx")
    # The parser goes on after an error; those that follow are often its consequences.
    first = errors[0]
    node = first.node_name()
    op = first.node_operator()
    text = plain(first.desc())
    # Of some faults the parser tells only which of its functions refused.
    if not node and not op:
        op, named = _suspects(str(first.func()), text, path)
        node = "".join(named[:1])
        if len(named) > 1:
            text += f" (one of {len(named)} {op} nodes: {first_few(named)})"
    if text == "false" or "Plugin not found" in text or "creator" in text:
        text = "it has no importer for this operator"
    what = f"TensorRT's parser refuses {op or 'the graph'}: {text}"
    others = sorted({e.node_name() for e in errors} - {node, ""})
    if others:
        what += f"; {len(others)} more nodes, {others[0]} among them"
    where = _where(node, op, modules)
    if op and not node:
        where = f"{op} node without a name, number {first.node()}"
    return StageError(what, where=where, hint=_hint(text))


def _suspects(function: str, text: str, path: Path) -> tuple[str, list[str]]:
    """The operator that a function such as `importScatterElements` imports, and the names of its nodes.

    Nodes with an attribute that the message mentions ("Unsupported reduction type") come alone, if there are any.
    """
    if not function.startswith("import"):
        return "", []
    op = function.removeprefix("import")
    nodes = [node for node in model_nodes(onnx_files.read_model(path)) if node.op_type == op]
    if not nodes:
        return "", []
    words = set(re.findall(r"\w+", text.lower()))
    with_attribute = [node for node in nodes if not words.isdisjoint(map(str.lower, node.attributes))]
    return op, [node.name or first_output(node) for node in with_attribute or nodes]


def build_failed(messages: Messages, layers: Sequence[Layer], modules: Mapping[str, str]) -> StageError:
    """An error with the builder's reason and, if it names one, the node."""
    text = reasons(messages)
    return StageError(
        f"TensorRT's builder gives no engine: {text}", where=_find(text, layers, modules), hint=_hint(text)
    )


def reasons(messages: Messages) -> str:
    """The first few errors in one line."""
    # One error may be logged several times.
    distinct = list(dict.fromkeys(plain(text) for text in messages.errors))
    return "; ".join(distinct[:3]) or "it gives no reason"


def inconsistent(messages: Messages, layers: Sequence[Layer], modules: Mapping[str, str]) -> StageError | None:
    """An error about a profile whose shapes the model can't run. The builder only warns, and builds."""
    for text in messages.of("WARNING"):
        match = _INCONSISTENT.search(text)
        if match is None:
            continue
        reason = plain(text[match.end() :].lstrip(". "))
        return StageError(
            f"the model can't run at the {match[1].lower()} shapes of a profile: {reason}",
            where=_find(text, layers, modules),
            hint="choose sizes the model accepts in `engine.profiles`, or where they are declared (`export.dynamic`, "
            "`import-onnx.dims`); they stop fitting at the node that is named",
        )
    return None


def summarise(messages: Messages) -> dict[str, int]:
    """Warnings without their places in TensorRT's sources, with the number of times each came."""
    return dict(Counter(plain(text) for text in messages.of("WARNING")))


def plain(text: str) -> str:
    """Removes places in TensorRT's sources, assertions and error codes from a message."""
    line = " ".join(part for part in text.splitlines() if part.strip() and not _NOISE.search(part)) or text.strip()
    while (shorter := _PLACE.sub("", line)) != line:
        line = shorter
    quoted = re.search(r'&& "(.+?)"', line)
    if quoted is not None:
        return quoted[1]
    assertion = re.search(r"Assertion failed: .*?: (?=[A-Z])(.+)", line)
    if assertion is not None:
        line = assertion[1]
    api_error = re.search(r"(?:API Usage|Shape|Internal) Error \((.+?)\.? In \S+ at /", line)
    if api_error is not None:
        return api_error[1].rstrip(". ")
    line = re.sub(r"\s*\(?\[?\(?In \w\S* at /\S+\)?", "", line)
    return re.sub(r"^(WARNING|ERROR):? ", "", line).strip()


def _hint(text: str) -> str:
    if "equal ranks" in text:
        return "fix the sizes that its condition depends on, so that fuse leaves one branch"
    if "build-time constant" in text or "not a constant" in text or "must be an initializer" in text:
        return "run fuse: constant folding makes it an initializer, unless it depends on an input"
    if "dedicated kernel" in text:
        return "export attention as MatMul and Softmax, or in float16"
    if text.startswith("Unsupported"):
        return "TensorRT has this operator but not this form: write it with other operators, or cut the model there"
    return ""


def _find(text: str, layers: Sequence[Layer], modules: Mapping[str, str]) -> str:
    """The node with the longest name in a message. Very short names would match in any sentence."""
    names = {layer.node for layer in layers if len(layer.node) > 2}
    named = [n for n in names if re.search(rf"(?<![\w/.]){re.escape(n)}(?![\w/])", text)]
    named += [n for n in names if f" {n}_" in text]  # helpers are named after their node
    if not named:
        return "engine"
    return _where(max(named, key=len), "", modules)


def _where(node: str, op: str, modules: Mapping[str, str]) -> str:
    if not node:
        return "model.onnx"
    where = f"{op or 'node'} {node}"
    if modules.get(node):
        where += f", module {modules[node]}"
    return where


def first_few(names: Sequence[str]) -> str:
    """At most three names in one line, with an ellipsis where there are more."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += ", …"
    return text
