"""What a rank reads from the others' signs of life, sentence by sentence."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from layerline.pipeline.errors import StageError
from layerline.training.distributed import heartbeat, rendezvous
from layerline.training.distributed.heartbeat import Pulse

_BACK = "the backward pass"


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

    def tell(self, rank: int, **state: Any) -> None:
        full = {"beat": 1, "step": 7, "phase": "forward", "inputs": "(4, 8)", "seconds": 3.2, "ended": "", **state}
        self[f"pulse/{rank}"] = json.dumps(full)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.02)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def own(store: Store, beats: None) -> Iterator[Pulse]:
    made = Pulse(store, 0, 2)
    made.inputs = "(4, 8)"
    made.at("the backward pass", 7)
    yield made
    made.close()


_UNLIKE = "its input is (4, 9), here (4, 8)"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, "gives no sign of life; it was last seen in forward of step 7"),
        ({"inputs": "(4, 9)"}, f"gives no sign of life; it was last seen in forward of step 7; {_UNLIKE}"),
        (
            {"ended": "without an error", "step": 6},
            "ended without an error in forward of step 6 (it had fewer batches)",
        ),
        ({"ended": "with ValueError: no"}, "ended with ValueError: no in forward of step 7"),
    ],
)
def test_a_rank_that_says_nothing_more(state: dict[str, Any], expected: str, own: Pulse, store: Store) -> None:
    store.tell(1, **state)
    assert own.diagnose() == f"rank 1 {expected}"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, "rank 1 is alive and has been in forward of step 7 for 3 s"),
        ({"phase": _BACK, "step": 6}, "rank 1 is alive and has been in the backward pass of step 6 for 3 s"),
        ({"phase": _BACK, "inputs": "(4, 9)"}, f"rank 1 is in the backward pass of step 7 as well; {_UNLIKE}"),
        ({"phase": _BACK}, "all ranks are alive and at the same step: the connection between them is broken"),
    ],
)
def test_a_rank_that_is_alive(
    state: dict[str, Any], expected: str, own: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = iter(range(100))
    monkeypatch.setattr(own, "_others", lambda _: {1: {**_state(**state), "beat": next(beats)}})
    assert own.diagnose() == expected


def _state(**changes: Any) -> dict[str, Any]:
    return {"step": 7, "phase": "forward", "inputs": "(4, 8)", "seconds": 3.2, "ended": "", **changes}


def test_a_rank_that_never_came_and_a_store_that_is_gone(own: Pulse, store: Store) -> None:
    assert own.diagnose() == "rank 1 never started"
    store.gone = True
    assert own.diagnose() == "the store does not answer"
    own.rank = 1
    assert own.diagnose() == "rank 0 is gone: the store that it keeps does not answer"


def test_only_a_failed_collective_is_put_on_other_ranks(own: Pulse, store: Store) -> None:
    store.tell(1, ended="with KeyError: 'x'")
    for error in (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), dist.DistBackendError("x")):
        expected = r"rank 0: reducing of step 8 failed after 0 s: rank 1 ended with KeyError"
        with pytest.raises(StageError, match=expected), own.guarded("reducing", 8):
            raise error
    with pytest.raises(RuntimeError, match="mat1 and mat2"), own.guarded("forward", 8):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_it_is_posted_and_the_last_word_stays(store: Store, beats: None) -> None:
    made = Pulse(store, 0, 2)
    made.at("forward", 3)
    time.sleep(0.1)
    first = json.loads(store["pulse/0"])
    assert (first["phase"], first["step"], first["ended"]) == ("forward", 3, "") and first["beat"] > 1
    made.close(StageError("channel 3 is all zeros", where="conv1", hint="prune it"))
    made.close()
    assert json.loads(store["pulse/0"])["ended"] == "with StageError: channel 3 is all zeros"
    assert not made._thread.is_alive()


def test_where_collectives_cannot_fail_the_thread_says_who_is_waited_for(
    store: Store, beats: None, caplog: pytest.LogCaptureFixture
) -> None:
    store.tell(1, step=6)
    made = Pulse(store, 0, 2, alarm_s=0.05)
    made.at("the backward pass", 7)
    with caplog.at_level(logging.ERROR, logger="layerline"):
        end = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.02)
    made.close()
    silent = "rank 1 gives no sign of life; it was last seen in forward of step 6"
    assert caplog.messages == [f"rank 0 waits in the backward pass of step 7: {silent}"]


def test_meeting_names_who_is_missing_and_who_has_ended() -> None:
    store = Store()
    store.set("here/here/2", "")
    with pytest.raises(StageError, match=r"rank 0: ranks 1, 3 of 4 did not come within 0\.05 s"):
        rendezvous.meet(store, "here", 0, 4, 0.05)
    with pytest.raises(StageError, match="rank 0: rank 1 ended with TaskError: no model"):
        rendezvous.meet(store, "here", 0, 4, 60, lambda missing: f"rank {missing[0]} ended with TaskError: no model")
    rendezvous.meet(store, "alone", 0, 1, 0.05)
