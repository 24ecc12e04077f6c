"""What a stage is handed to work with: a temporary folder where nothing is kept, and the artifacts before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from layerline.pipeline.records.run_lock import temporary_folder
from layerline.pipeline.records.store import Artifact
from layerline.pipeline.stage import Log, Stage, Work
from layerline.pipeline.task import Task


@contextmanager
def temporary_work(task: Task, log: Log, inputs: Mapping[str, Path], parts: Mapping[str, str]) -> Iterator[Work]:
    """What a stage is handed where nothing of it is kept."""
    with temporary_folder() as folder:
        out, scratch = folder / "out", folder / "scratch"
        out.mkdir()
        scratch.mkdir()
        yield Work(inputs=inputs, task=task, out=out, scratch=scratch, log=log, parts=parts)


def input_folders(stage: Stage, made: Mapping[str, Artifact | None]) -> dict[str, Path]:
    """The folder of the artifact behind each port of a stage, of the artifacts there are by kind."""
    artifacts = {port: made[kind] for port, kind in stage.takes.items()}
    return {port: artifact.path for port, artifact in artifacts.items() if artifact is not None}
