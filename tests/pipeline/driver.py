"""The command line with fake stages, for tests that need a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def start(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts `pipe ARGUMENTS` in a project's folder."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    command = [sys.executable, "-m", "tests.pipeline.driver", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=root, env=env, **pipes)


def run(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `pipe ARGUMENTS` to its end."""
    process = start(root, *arguments, **environment)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _write_modules(path: Path) -> None:
    path.write_text("\n".join(sorted(sys.modules)))


if __name__ == "__main__":
    from layerline import __main__ as command

    signal.signal(signal.SIGINT, command._interrupted)
    if "READY_TO" in os.environ:
        Path(os.environ["READY_TO"]).touch()
    from layerline.cli import main
    from tests.pipeline import fakes

    fakes.install(setattr)
    if "MODULES_TO" in os.environ:
        atexit.register(_write_modules, Path(os.environ["MODULES_TO"]))
    main()
