"""What a rank reads from the phases that the others have posted, sentence by sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from layerline.pipeline.errors import StageError
from layerline.training.distributed import rendezvous
from layerline.training.distributed.rendezvous import Phases

_BACK = "the backward pass"
_NOBODY = "no rank is behind: one hangs or was killed, or the connection between them is broken"


class Store(dict[str, str]):
    """Keeps what it is told in this process."""

    gone = False

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise dist.DistNetworkError("Broken pipe")
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise dist.DistNetworkError("Connection was likely closed")
        return all(k in self for k in keys)

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]

    def post(self, rank: int, **state: Any) -> None:
        self[f"phase/{rank}"] = json.dumps({"step": 7, "phase": _BACK, "ended": "", **state})


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def own(store: Store, monkeypatch: pytest.MonkeyPatch) -> Phases:
    monkeypatch.setattr(rendezvous, "_LAST_POST_S", 0)
    phases = Phases(store, 0, 2)
    phases.at(_BACK, 7)
    return phases


_UPDATED = "the user's code after the update"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"phase": _UPDATED, "step": 6}, f"rank 1 was last seen in {_UPDATED} of step 6"),
        ({"phase": _BACK, "step": 6}, "rank 1 was last seen in the backward pass of step 6"),
        ({"phase": _UPDATED}, f"rank 1 was last seen in {_UPDATED} of step 7"),
        ({}, _NOBODY),
        (
            {"phase": "reducing gradients"},
            f"{_NOBODY}; rank 1 was last seen in reducing gradients of step 7",
        ),
        (
            {"ended": "without an error", "step": 6},
            "rank 1 ended without an error in the backward pass of step 6 (it had fewer batches)",
        ),
        ({"ended": "with ValueError: no"}, "rank 1 ended with ValueError: no in the backward pass of step 7"),
    ],
)
def test_a_rank_that_others_wait_for(state: dict[str, Any], expected: str, own: Phases, store: Store) -> None:
    store.post(1, **state)
    assert own.diagnose() == expected


def test_a_rank_that_never_came_and_a_store_that_is_gone(own: Phases, store: Store) -> None:
    assert own.diagnose() == "rank 1 never started"
    store.gone = True
    assert own.diagnose() == "the store does not answer"
    own.rank = 1
    assert own.diagnose() == "rank 0 is gone: the store that it keeps does not answer"


def test_only_a_failed_collective_is_put_on_other_ranks(own: Phases, store: Store) -> None:
    store.post(1, ended="with KeyError: 'x'")
    for error in (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), dist.DistBackendError("x")):
        expected = r"rank 0: reducing of step 8 failed after 0 s: rank 1 ended with KeyError"
        with pytest.raises(StageError, match=expected), own.guarded("reducing", 8):
            raise error
    with pytest.raises(RuntimeError, match="mat1 and mat2"), own.guarded("forward", 8):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_it_is_posted_and_the_last_word_stays(store: Store, own: Phases) -> None:
    own.at("reducing gradients", 3)
    assert json.loads(store["phase/0"]) == {"step": 3, "phase": "reducing gradients", "ended": ""}
    own.close(StageError("channel 3 is all zeros", where="conv1", hint="prune it"))
    own.close()
    assert json.loads(store["phase/0"])["ended"] == "with StageError: channel 3 is all zeros"


def test_meeting_names_who_is_missing_and_who_has_ended() -> None:
    store = Store()
    store.set("here/here/2", "")
    with pytest.raises(StageError, match=r"rank 0: ranks 1, 3 of 4 did not come within 0\.05 s"):
        rendezvous.meet(store, "here", 0, 4, 0.05)
    with pytest.raises(StageError, match="rank 0: rank 1 ended with TaskError: no model"):
        rendezvous.meet(store, "here", 0, 4, 60, lambda missing: f"rank {missing[0]} ended with TaskError: no model")
    rendezvous.meet(store, "alone", 0, 1, 0.05)
