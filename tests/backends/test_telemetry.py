"""No runtime leaves an id of the user, or anything else, outside of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_SCRIPT = """
import sys
from onnx import parser
from layerline.backends import get
model = parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Relu (x) }')
session = get(sys.argv[1]).open(model.SerializeToString())
import numpy as np
print(session.run({"x": np.float32([-1, 2])})["y"].tolist())
"""


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_runtime_leaves_nothing_in_the_home_folder(runtime: str, tmp_path: Path) -> None:
    if find_spec(runtime) is None:
        pytest.skip(f"{runtime} is not installed")
    # The variables by which its own code takes this run for one of a CI, and sends nothing, are taken out.
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "TF_BUILD", "JENKINS_URL", "ORT_DISABLE_TELEMETRY")}
    env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, runtime], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[0.0, 2.0]", done.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
