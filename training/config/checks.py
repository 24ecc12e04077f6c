"""Refuses what a configuration asks for and nothing would read, or what lacks the length of the run. Errors name the
canonical field; `aliases` puts the name there under which it was written."""

from __future__ import annotations

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config, SchedulerConfig

# Schedules that end: their last rate is reached at total_steps.
NEED_TOTAL = ("cosine", "polynomial", "one_cycle", "wsd")
_COUNTING = ("step", "multistep", "exponential")
# What only some schedules read -> which ones.
_READ_BY = {
    "power": ("polynomial",), "step_size": ("step",), "gamma": _COUNTING, "div_factor": ("one_cycle",),
    "final_div_factor": ("one_cycle",), "factor": ("plateau",), "patience": ("plateau",), "threshold": ("plateau",),
    "mode": ("plateau",), "milestones": ("multistep",), "count_warmup": _COUNTING, "period": ("cosine_restarts",),
    "period_mult": ("cosine_restarts",), "decay_ratio": ("wsd",), "cycle_momentum": ("one_cycle",),
}  # fmt: skip
# A field without which a schedule has no meaning -> what it is.
_REQUIRED = {
    "step": ("step_size", "the number of steps between two decays"),
    "multistep": ("milestones", "the steps at which the rate decays"),
    "cosine_restarts": ("period", "the number of steps until the first restart"),
}


def check(config: Config, *, length: bool) -> None:
    """Refuses fields that nobody reads, and with `length` a missing length of the run."""
    rule = config.optimizer
    if rule.ignored:
        what = f"{rule.name} has no {rule.ignored}; it takes {rule.takes}"
        raise ConfigError(what, where=f"optimizer.{rule.ignored}")
    for name in ("start_step", "warmup"):
        if "decay" not in config.ema.model_fields_set and getattr(config.ema, name):
            hint = "set ema.decay, for example to 0.999"
            raise ConfigError("there is no average: EMA is off", where=f"ema.{name}", hint=hint)
    if config.swa.share is not None and config.ema.on:
        raise ConfigError("SWA's average would ship, and EMA is on too", where="swa.share", hint="set ema.decay to 0")
    mode, better = config.scheduler.mode, config.monitor.better
    if mode is not None and better is not None and (mode == "max") is not (better == "higher"):
        what = f"scheduler.mode is {mode} and monitor.better is {better}: both say which metric is better"
        raise ConfigError(what, where="scheduler.mode", hint="keep one of the two")
    _check_schedule(config.scheduler)
    if length:
        _check_length(config)


def warmup_steps(config: SchedulerConfig) -> int:
    """Length of the warm-up in optimizer steps."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    if not config.warmup_ratio:
        return 0
    if config.total_steps is None:
        hint = "or give warmup_steps"
        raise ConfigError("warmup_ratio needs the length of the run", where="scheduler.total_steps", hint=hint)
    return round(config.warmup_ratio * config.total_steps)


def _check_schedule(config: SchedulerConfig) -> None:
    for name, readers in _READ_BY.items():
        if config.name not in readers and getattr(config, name) != type(config).model_fields[name].default:
            hint = f"it is for {' and '.join(readers)}"
            raise ConfigError(f"{config.name} has no {name}", where=f"scheduler.{name}", hint=hint)
    floors = [f for f in ("min_lr", "min_lr_ratio") if getattr(config, f)]
    if config.name == "constant" and floors:
        hint = "name a schedule that decays, cosine for example"
        raise ConfigError(f"a constant rate has no {floors[0]}", where=f"scheduler.{floors[0]}", hint=hint)
    field, meaning = _REQUIRED.get(config.name, ("", ""))
    if field and getattr(config, field) is None:
        raise ConfigError(f"{config.name} needs {meaning}", where=f"scheduler.{field}")
    if config.warmup_start is not None and not (config.warmup_steps or config.warmup_ratio):
        raise ConfigError("there is no warm-up", where="scheduler.warmup_start", hint="give warmup_steps")
    if config.warmup_start is not None and config.name == "one_cycle":
        raise ConfigError("one_cycle starts at 1/div_factor", where="scheduler.warmup_start", hint="set div_factor")


def _check_length(config: Config) -> None:
    total, name = config.scheduler.total_steps, config.scheduler.name
    # Who needs the length, and at which field that is said.
    needs_length: dict[str, tuple[str, bool]] = {
        "swa.share": ("swa", config.swa.share is not None),
        "pruning.end_step": ("pruning", config.pruning.method is not None and config.pruning.end_step is None),
        "scheduler.total_steps": (name, name in NEED_TOTAL),
    }
    for path, (user, needs) in needs_length.items():
        if needs and total is None:
            hint = "set scheduler.total_steps to the number of optimizer steps, not of micro-batches"
            raise ConfigError(f"{user} needs the length of the run", where=path, hint=hint)
    warmup = warmup_steps(config.scheduler)
    if total is not None and warmup >= total:  # the base rate would never be reached
        raise ConfigError(f"warm-up takes {warmup} steps of a run of {total}", where="scheduler.warmup_steps")
