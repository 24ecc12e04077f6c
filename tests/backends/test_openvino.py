"""OpenVINO as a backend: what it leaves behind in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.backends import models

# faulthandler gives the main thread a stack for signal handlers, as pytest and many servers do.
SESSIONS = """
import faulthandler, os, signal, sys
faulthandler.enable()
from layerline import backends

older = backends.get("openvino").open(sys.argv[1])
newer = backends.get("openvino").open(sys.argv[1])
del older
del newer
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_after_two_sessions_is_handled(tmp_path: Path) -> None:
    """With an OpenVINO core for each session, the handler had a stack that was no longer mapped: segmentation fault."""
    pytest.importorskip("openvino")
    path = tmp_path / "model.onnx"
    onnx.save(models.conv(), str(path))
    done = subprocess.run([sys.executable, "-c", SESSIONS, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
