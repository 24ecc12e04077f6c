"""The best checkpoints of a run by its metric, and when to stop because it no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from layerline.pipeline.errors import StageError
from layerline.pipeline.untrusted import is_file_name, printable
from layerline.training.config.sections import Config

FOLDER = "best"


class Entry(NamedTuple):
    """One validation that was among the best: its metric, the step it was taken at, and its checkpoint's file name."""

    metric: float
    step: int
    file: str


class Best:
    """Follows the metric of what would ship."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._higher = config.monitor, config.higher_is_better
        self.folder = folder
        # The best validations, the best first; at most `keep_best`, and one where nothing is kept
        self.entries: list[Entry] = []
        self.waited = 0  # validations since the last improvement

    @property
    def should_stop(self) -> bool:
        """Whether `early_stop` validations in a row brought no improvement."""
        return self._config.early_stop is not None and self.waited >= self._config.early_stop

    def observe(self, metric: float, step: int, save: Callable[[Path], object]) -> None:
        """Takes in one validation; NaN is never among the best. Of several at one step the best one counts: they share
        a checkpoint."""
        for before in self.entries:
            if before.step == step:
                if not self._beats(metric, before.metric):
                    return
                self.entries.remove(before)
                break
        ahead = sum(not self._beats(metric, entry.metric) for entry in self.entries)
        improved = ahead == 0 and not math.isnan(metric)
        # NaN is no improvement.
        self.waited = 0 if improved else self.waited + 1
        keep = max(self._config.keep_best, 1)
        if math.isnan(metric) or ahead >= keep:
            return
        file = ""
        if self._config.keep_best:
            file = f"step-{step:08d}.safetensors"
            save(self.folder / file)
        self.entries.insert(ahead, Entry(metric, step, file))
        for entry in self.entries[keep:]:
            if entry.file:
                (self.folder / entry.file).unlink(missing_ok=True)
        del self.entries[keep:]

    def _beats(self, metric: float, other: float) -> bool:
        if self._higher:
            return metric > other
        return metric < other

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [list(entry) for entry in self.entries], "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        entries = [Entry(float(metric), int(step), str(file)) for metric, step, file in state["entries"]]
        for entry in entries:
            # The checkpoint may come from elsewhere, and these files are deleted later on.
            if entry.file and not is_file_name(entry.file):
                raise StageError(f"a best checkpoint is called {printable(entry.file)}", where="checkpoint",
                                 hint="it is no name of a file in the folder of best checkpoints")  # fmt: skip
        self.entries, self.waited = entries, int(state["waited"])
