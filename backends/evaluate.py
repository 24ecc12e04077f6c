"""The task's metric of loaded models over its evaluation data: one pass over the data for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from layerline.backends.base import Array, Session
from layerline.pipeline.inputs.metric import joined


class Batch(Protocol):
    """What one run is fed with and what its outputs should be; `real` takes off the rows that are no samples."""

    @property
    def feed(self) -> Mapping[str, Array]: ...
    @property
    def target(self) -> Any: ...
    def real(self, array: Array, /) -> Array: ...


@dataclass(frozen=True, eq=False)
class Predictions:
    """What models gave for the same samples.

    Attributes:
        outputs: by the caller's name of the model: an array, or a tuple of arrays, joined along the first axis.
        targets: joined likewise, in the tuples and dicts that the data has them in; None where it has none.
    """

    outputs: dict[str, Array | tuple[Array, ...]]
    targets: Any


def predict(sessions: Mapping[str, Session], batches: Iterable[Batch]) -> Predictions:
    """Runs every session on every batch.

    Raises:
        TaskError: outputs or targets that cannot be joined.
    """
    outputs: dict[str, list[list[Array]]] = {name: [] for name in sessions}
    targets: list[Any] = []
    for batch in batches:
        if batch.target is not None:
            targets.append(batch.target)
        for name, session in sessions.items():
            found = session.run(batch.feed)
            outputs[name].append([batch.real(found[o]) for o in session.outputs])
    whole = {name: tuple(joined(list(p), "outputs") for p in zip(*o, strict=True)) for name, o in outputs.items()}
    return Predictions(
        outputs={name: parts[0] if len(parts) == 1 else parts for name, parts in whole.items()},
        targets=joined(targets, "targets") if targets else None,
    )
