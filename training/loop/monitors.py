"""What a run is doing, row by row, and early warnings in words. Reads only numbers the step has on the CPU anyway."""

from __future__ import annotations

import csv
import logging
import math
import statistics
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import machine_lacks
from layerline.training.config.sections import MonitorConfig
from layerline.training.model.split_tensors import device_of, local

if sys.platform != "win32":
    import resource

COLUMNS = (
    "step", "loss", "loss_smooth", "grad_norm", "clip_rate", "lr", "update_ratio", "samples_s", "wait_rate",
    "peak_mb", "loss_scale", "skipped", "metric_online", "metric_deploy", "deploy_gap",
)  # fmt: skip
# What `print` shows of a row.
_PRINTED = ("loss", "lr", "grad_norm", "samples_s", "metric_online", "metric_deploy")
_SMOOTHING = 0.98
_NORMS_KEPT = 101
# Accepted steps between two decisions on what to warn of, however often rows are written.
_REVIEW = 10
# Up to this step, every row has an `update_ratio`.
_EACH_UPDATE = 100
# Accepted steps in a row with a small gradient norm, from which on they are warned of.
_LOW = 50
# Seconds between two readings of peak memory, at least: it hardly grows in between, and asking the kernel costs.
_PEAK_EVERY = 0.1
# Bytes of weights that `update_ratio` is measured on: more of them say nothing new, and they are copied for it. They
# are the first elements of so many parameters at most, from the first to the last one at equal distances.
_RATIO_BYTES, _RATIO_PARAMS = 2**13, 64


class Monitor:
    """Collects one row every `log_interval` accepted steps. `samples_s` counts weights where losses come with one,
    micro-batches else. `update_ratio` is ‖Δw‖ / ‖w‖ of the step that is logged, over the first elements of up to 64
    parameters, 8 KiB in all. A cell that was not measured is empty."""

    def __init__(self, config: MonitorConfig, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self.interval = config.log_interval
        self.columns: tuple[str, ...] = COLUMNS
        self.per_layer = config.per_layer
        self.rows: list[array[float]] = []  # one array of float64 per row, in the order of `columns`
        if self.per_layer:
            self.add_columns([f"grad_norm/{name}" for name in names])
        # Whether data are loaded when needed, so that more workers could help; off where they lie in memory
        self.loads = True
        # Where each kind of warning is said, once a run; the `layerline.training` logger by default
        self.speak: Callable[[str], object] = logging.getLogger("layerline.training").warning
        self.write: Callable[[str], object] | None = None
        if config.print:
            self.write = partial(print, flush=True)
        self.trackers: list[Callable[[dict[str, float]], object]] = []
        self._hushed = False
        # Warnings by key: those whose cause still holds, the first text of each, and how often it was given.
        self._active: set[str] = set()
        self._said: dict[str, str] = {}
        self._times: Counter[str] = Counter()
        self._measures_updates = config.update_ratio
        self._params = params
        # Views of the weights that `update_ratio` is measured on, where all weights lay when they were made, and the
        # values before the step that is logged.
        self._sample: list[Tensor] = []
        self._addresses: list[int] = []
        self._before: Tensor | None = None
        self._device = device_of(params[0])
        self._norms: deque[float] = deque(maxlen=_NORMS_KEPT)
        self._median = math.inf
        self._low = 0  # steps in a row whose norm was far below the median
        self._smooth = math.nan
        # Totals, and what they were at the last row and at the last decision on what to warn of
        self._steps = self._clipped = 0
        self._scale_drops = 0  # since the last decision
        self._weight = self.waited = 0.0
        self._at_row = self._at_review = self._totals()
        self._peak, self._peak_read = 0.0, -math.inf

    def _totals(self) -> tuple[float, ...]:
        """Sums since this process began, and the clock."""
        return self._steps, self._clipped, self._weight, self.waited, time.perf_counter()

    def hush(self) -> None:
        """Goes on watching, but leaves it to another rank to speak and to draw."""
        self.speak, self.write, self.trackers = lambda _: None, None, []
        self._hushed = True

    @property
    def warnings(self) -> list[str]:
        """One sentence for each kind of warning, as first given, with the number of times its cause occurred."""
        texts = []
        for key, text in self._said.items():
            count = self._times[key]
            texts.append(f"{text} ({count} times)" if count > 1 else text)
        return texts

    def add_columns(self, names: Sequence[str]) -> None:
        """Further columns, which are empty in the rows so far."""
        self.columns += tuple(names)
        for row in self.rows:
            row.extend([math.nan] * len(names))

    def rename(self, names: Mapping[str, str]) -> None:
        """Parameters are called otherwise from now on: their columns as well."""
        columns = {f"grad_norm/{old}": f"grad_norm/{new}" for old, new in names.items()}
        self.columns = tuple(columns.get(c, c) for c in self.columns)

    def due(self, step: int) -> bool:
        """Whether accepted step number `step` will be a row."""
        return self.interval > 0 and step % self.interval == 0

    def before(self, step: int) -> None:
        """Called before a step that will be a row."""
        # `update_ratio` costs more than the rest of a row: after the first steps it is measured once in ten of them,
        # at steps that a resumed run measures too.
        is_first_of_ten = step // _REVIEW > (step - self.interval) // _REVIEW
        if not self._measures_updates or (step > _EACH_UPDATE and not is_first_of_ten):
            return
        addresses = list(map(Tensor.data_ptr, self._params))
        if addresses != self._addresses:  # the first time, and where `module.to()` has moved them
            self._sample, self._addresses = _first_elements(self._params), addresses
        if self._sample:
            self._before = torch.cat(self._sample)

    def accepted(self, loss: float, norm: float, weight: float, *, clipped: bool) -> None:
        """Takes in one accepted step."""
        self._steps += 1
        self._weight += weight
        self._norms.append(norm)
        if clipped:
            self._clipped += 1
        if math.isnan(self._smooth):  # before the first loss
            self._smooth = loss
        elif not math.isnan(loss):
            self._smooth = _SMOOTHING * self._smooth + (1 - _SMOOTHING) * loss
        if norm > 100 * self._median:
            self.warn("norm_high", f"gradient norm {norm:.3g} is above 100 times its median {self._median:.3g}")
        elif norm < 0.1 * self._median < math.inf:
            self._low += 1
            if self._low == _LOW:
                self.warn("norm_low", f"gradient norm below a tenth of its median for {_LOW} steps")
        else:
            self._low = 0
        if self._steps % _REVIEW == 0:
            self._review(norm)

    def scale_fell(self, scale: float, *, at_floor: bool) -> None:
        """Takes in one rejected step of fp16."""
        self._scale_drops += 1
        if at_floor:
            self.warn("scale", f"the loss scale is down to {scale:g} and steps still overflow")
        elif self._scale_drops >= 5:
            text = f"the loss scale keeps falling: {scale:g} now, {self._scale_drops} halvings in a few steps"
            self.warn("scale", text)

    def row(
        self, step: int, loss: float, norm: float, lr: float, scale: float, skipped: int, more: Mapping[str, float]
    ) -> None:
        """Closes an interval with a row; `more` are the cells of further columns."""
        totals = self._totals()
        steps, clipped, weight, waited, seconds = map(sub, totals, self._at_row)
        self._at_row = totals
        seconds = max(seconds, 1e-9)
        clock = totals[-1]
        if clock - self._peak_read > _PEAK_EVERY:
            self._peak, self._peak_read = peak_bytes(self._device) / 2**20, clock
        ratio = math.nan
        if self._before is not None:
            ratio = self._ratio(self._before)
        # In the order of COLUMNS; the last three are a validation's, which comes later.
        cells = [
            step, loss, self._smooth, norm, clipped / max(steps, 1), lr, ratio, weight / seconds,
            waited / seconds or math.nan, self._peak, scale, skipped, math.nan, math.nan, math.nan,
        ]  # fmt: skip
        cells += [more.get(column, math.nan) for column in self.columns[len(COLUMNS) :]]
        self.rows.append(array("d", cells))
        if self.write is not None or self.trackers:
            self._publish(dict(zip(self.columns, cells, strict=True)))

    def speed(self) -> dict[str, float]:
        """`samples_s` of the last interval that was measured: a row of a validation alone has none."""
        at = self.columns.index("samples_s")
        for row in reversed(self.rows):
            if not math.isnan(row[at]):
                return {"samples_s": row[at]}
        return {}

    def validated(self, step: int, online: float, deploy: float) -> None:
        """Puts both metrics of a validation beside the step's row."""
        if not self.rows or self.rows[-1][0] != step:
            self.rows.append(array("d", [math.nan] * len(self.columns)))
            self.rows[-1][0] = step
        at = COLUMNS.index("metric_online")
        self.rows[-1][at : at + 3] = array("d", [online, deploy, online - deploy])
        self._publish({"step": step, "metric_online": online, "metric_deploy": deploy, "deploy_gap": online - deploy})

    def track(self, call: Callable[[dict[str, float]], object]) -> None:
        """Calls `call` with each row from now on, as a dict of what was measured; on the rank that speaks."""
        if not self._hushed:
            self.trackers.append(call)

    def replay(self) -> None:
        """Hands the rows so far, which a checkpoint brought, to the trackers."""
        for row in self.rows:
            self._track(dict(zip(self.columns, row, strict=True)))

    def _track(self, values: Mapping[str, float]) -> dict[str, float]:
        measured = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        for call in self.trackers:
            call(dict(measured))
        return measured

    def _publish(self, values: Mapping[str, float]) -> None:
        """Hands a row to the user's trackers, and prints it."""
        measured = self._track(values)
        if self.write is not None:
            figures = [f"{name} {measured[name]:.4g}" for name in _PRINTED if name in measured]
            self.write(f"step {measured['step']:.0f}: {', '.join(figures)}")

    def state_dict(self) -> dict[str, Any]:
        flat = torch.tensor(self.rows, dtype=torch.float64).reshape(-1, len(self.columns))
        return {"rows": flat, "columns": list(self.columns), "smooth": self._smooth, "norms": list(self._norms),
                "median": self._median, "low": self._low, "warnings": dict(self._said), "times": dict(self._times),
                "active": sorted(self._active)}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = []
        for numbers in state["rows"].tolist():
            cells = dict(zip(state["columns"], numbers, strict=True))
            self.rows.append(array("d", [cells.get(column, math.nan) for column in self.columns]))
        self._smooth, self._median, self._low = state["smooth"], state["median"], state["low"]
        self._norms.clear()
        self._norms.extend(state["norms"])
        self._at_row = self._at_review = self._totals()  # an interval does not go over a break
        self._scale_drops = 0
        # What this process has already said (of the model, before it loaded; before a rollback) stays said.
        self._said = {**state["warnings"], **self._said}
        self._times |= Counter(state["times"])  # the greater count of each
        self._active |= set(state["active"])

    def _ratio(self, before: Tensor) -> float:
        self._before = None
        # Each number is read from the device once.
        size = torch.linalg.vector_norm(before).item()
        moved = torch.linalg.vector_norm(before.sub_(torch.cat(self._sample))).item()
        return moved / size if size else math.nan

    def _review(self, norm: float) -> None:
        """Decides what to warn of. A cause that is gone is warned of again when it comes back."""
        totals = self._totals()
        steps, clipped, _, waited, seconds = map(sub, totals, self._at_review)
        self._at_review = totals
        self._median = statistics.median(self._norms)
        clip_rate = clipped / max(steps, 1)
        if clip_rate > 0.3:
            self.warn("clip", f"{clip_rate:.0%} of the steps were clipped: lower the rate or raise the bound")
        else:
            self._active.discard("clip")
        wait_rate = waited / max(seconds, 1e-9)
        if self.loads and wait_rate > 0.3:
            self.warn("wait", f"{wait_rate:.0%} of the time goes to waiting for data: more workers may help")
        else:
            self._active.discard("wait")
        if norm <= 100 * self._median:
            self._active.discard("norm_high")
        if not self._low:
            self._active.discard("norm_low")
        if not self._scale_drops:
            self._active.discard("scale")
        self._scale_drops = 0

    def warn(self, key: str, text: str) -> None:
        """Counts a warning, unless the last one of this `key` still holds. The first one of each key is also logged."""
        if key in self._active:
            return
        self._active.add(key)
        self._times[key] += 1
        if key not in self._said:
            self._said[key] = text
            self.speak(text)


def export(monitors: Mapping[str, Monitor], path: Path) -> None:
    """Writes all rows of each model, to `<stem>-<name>.csv` where it has a name. What was not measured is empty."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, monitor in monitors.items():
            target = path.with_name(f"{path.stem}-{name}{path.suffix}") if name else path
            with target.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(monitor.columns)
                for row in monitor.rows:
                    cells = ["" if math.isnan(value) else f"{value:.9g}" for value in row[1:]]
                    writer.writerow([int(row[0]), *cells])
    except OSError as error:
        raise machine_lacks(error) from error


def peak_bytes(device: torch.device) -> int:
    """Greatest memory in use so far: the allocator's on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _first_elements(params: Sequence[Tensor]) -> list[Tensor]:
    """Flat views of the first elements of some parameters, of one type and device. Of a sharded one it is this rank's
    part."""
    distance = -(-len(params) // _RATIO_PARAMS)
    parts = [local(p).detach() for p in params[::distance]]
    share = max(_RATIO_BYTES // parts[0].element_size() // len(parts), 1)
    kept: list[Tensor] = []
    for part in parts:
        dense = part.is_contiguous() or (part.ndim == 4 and part.is_contiguous(memory_format=torch.channels_last))
        if dense and (part.dtype, part.device) == (parts[0].dtype, parts[0].device):
            kept.append(part.as_strided((min(part.numel(), share),), (1,)))
    return kept
