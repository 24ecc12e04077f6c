"""Runtimes that report home are told not to, before they are imported: none of them asks.

onnxruntime (1.24 and later) makes an id of the user and a database in the cache folder when it is imported; openvino
makes an id in the home folder and sends an event.
"""

from __future__ import annotations

import os
import sys


def switch_off() -> None:
    """Call it before the import of a runtime; a second call changes nothing."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if "openvino_telemetry" not in sys.modules:
        # openvino takes a stub that does nothing where this package can't be imported.
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
