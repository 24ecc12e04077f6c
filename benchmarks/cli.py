"""The command line's own time: `pipe --help`, a run in which everything is cached, and the runner around 500 MB.

- `pipe --help` beside `python -c "import typer, rich"`, in turn; medians of whole processes.
- `pipe run all` on the MNIST example, cold once, then cached; medians of whole processes.
- A stage that writes 500 MB: the runner's seconds beyond the stage's own, next to one SHA-256 of such a file and one
  fsync of such a file, and how many bytes the process read for each byte of the artifact.

Ends in one JSON line. `--skip-example` leaves out the MNIST example, which needs the extra `demo` and a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from layerline.pipeline import stage_table
from layerline.pipeline.config import project
from layerline.pipeline.hashing import sha256
from layerline.pipeline.report import Report
from layerline.pipeline.run.runner import Runner
from layerline.pipeline.stage import Stage, Work
from layerline.views.terminal import Silent

PIPE = [sys.executable, "-m", "layerline.cli"]
PIECE = os.urandom(1 << 20)


class Big(Stage):
    """Writes one large file and does nothing else."""

    name: ClassVar[str] = "big"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "big"

    megabytes: int

    def run(self, work: Work) -> Report:
        write(work.out / "big.bin", self.megabytes)
        return Report(stage=self.name)


def write(path: Path, megabytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(PIECE)


def seconds(command: list[str], folder: Path | None = None) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure_help(rounds: int) -> dict[str, float]:
    ours, imports = [], []
    for _ in range(rounds):
        ours.append(seconds([*PIPE, "--help"]))
        imports.append(seconds([sys.executable, "-c", "import typer, rich"]))
    return _pair("help_s", statistics.median(ours), "import_typer_rich_s", statistics.median(imports), "help_ratio")


def measure_cached(rounds: int, folder: Path) -> dict[str, float]:
    seconds([*PIPE, "init", str(folder)])
    cold = seconds([*PIPE, "run", "all"], folder)
    cached = statistics.median(seconds([*PIPE, "run", "all"], folder) for _ in range(rounds))
    return {"mnist_cold_s": round(cold, 2), "mnist_cached_s": round(cached, 3)}


def measure_big(megabytes: int, folder: Path) -> dict[str, float]:
    """The runner's own work on one large artifact, beside what none can do without: reading and syncing it once."""
    (folder / "pipe.yaml").write_text(f"big: {{megabytes: {megabytes}}}\n")
    read, started = _bytes_read(), time.perf_counter()
    done = Runner(project.load(folder), Silent()).run()
    own, read = time.perf_counter() - started, _bytes_read() - read
    assert done.passed and done.results[0].record is not None
    own -= done.results[0].record.seconds

    plain = folder / "plain.bin"
    write(plain, megabytes)
    started = time.perf_counter()
    sha256(plain)
    hashing = time.perf_counter() - started
    with plain.open("rb") as file:
        started = time.perf_counter()
        os.fsync(file.fileno())
        syncing = time.perf_counter() - started
    size = megabytes << 20
    figures = {"sha256_s": round(hashing, 2), "fsync_s": round(syncing, 2), "reads_of_artifact": round(read / size, 3)}
    return _pair("runner_s", own, "hash_and_sync_s", hashing + syncing, "runner_ratio") | figures


def _bytes_read() -> int:
    """Bytes this process has read so far, from the disk or the page cache; 0 where the system doesn't count them."""
    counters = Path("/proc/self/io")
    return int(counters.read_text().split()[1]) if counters.exists() else 0


def _pair(ours: str, a: float, other: str, b: float, ratio: str) -> dict[str, float]:
    return {ours: round(a, 3), other: round(b, 3), ratio: round(a / b, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--skip-example", action="store_true")
    options = parser.parse_args()
    stage_table.BUILT_IN = {"big": f"{__name__}:Big"}
    figures = measure_help(options.rounds)
    print(figures)
    with tempfile.TemporaryDirectory() as folder:
        figures |= measure_big(options.megabytes, Path(folder))
        print(figures)
    if not options.skip_example:
        with tempfile.TemporaryDirectory() as folder:
            figures |= measure_cached(options.rounds, Path(folder) / "mnist")
    print(json.dumps({"benchmark": "cli", **figures}))


if __name__ == "__main__":
    main()
