"""Imports of ONNX files run in the test's own process, which saves a second each; a module with `OWN_PROCESS` asks for
the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerline.backends import subprocess_build
from layerline.backends.subprocess_build import Limits, OutputLog


class Direct:
    """A relay with nothing between."""

    def __init__(self, log: OutputLog) -> None:
        self.say = log.say

    def suspect(self, text: str) -> None: ...


def _here(function: Callable[..., Any], *args: Any, limits: Limits, log: OutputLog) -> Any:
    return function(*args, Direct(log))


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not getattr(request.module, "OWN_PROCESS", False):
        monkeypatch.setattr(subprocess_build, "bounded", _here)
