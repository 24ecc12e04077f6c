"""Where the command `pipe` starts: an interrupt is told from the first moment, before anything slow is imported."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and exits."""
    signal.signal(signal.SIGINT, _interrupted)
    from layerline.cli import main as run

    run()


def _interrupted(_number: int, _frame: object) -> NoReturn:
    # The sentence of `pipeline.process_env`, which is not imported yet; nothing has begun, so nothing is cleaned up.
    os.write(2, b"\ninterrupted; what was finished is kept, and the same command goes on from there\n")
    os._exit(130)


if __name__ == "__main__":
    main()
