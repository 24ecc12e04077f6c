"""Reads configurations: two common shapes of the same settings, presets, and errors that name the field. Shape one has
clipping, EMA, precision and intervals under `training`; shape two has them in `precision`, `gpu` and `distributed`. One
table of moves maps both to the sections of `Config`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from layerline.pipeline.config.document import Document
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import closest, hint
from layerline.training.config import schedules
from layerline.training.config.sections import Config, GroupRule, OptimizerName, SchedulerName, Section

# Accepted field -> canonical field.
MOVES: dict[str, str] = {
    "optimizer.grad_clip.max_norm": "clip.max_norm",
    "optimizer.grad_clip.value": "clip.value",
    "training.grad_clip_norm": "clip.max_norm",
    "training.grad_clip_value": "clip.value",
    "training.ema_decay": "ema.decay",
    "training.ema_start_step": "ema.start_step",
    "training.ema_warmup": "ema.warmup",
    "training.mixed_precision": "precision.amp",
    "training.accumulate_steps": "accumulate.steps",
    "training.on_oom": "accumulate.on_oom",
    "gpu.gradient_accumulation_steps": "accumulate.steps",
    "gpu.checkpointing": "memory.checkpointing",
    "gpu.checkpoint_interval": "memory.checkpoint_interval",
    "distributed.gradient_bucket_size_mb": "distributed.bucket_mb",
    "distributed.overlap_communication": "distributed.overlap",
}
for _name in ("log_interval", "save_interval", "save_dir", "valid_interval", "keep_best", "early_stop"):
    MOVES[f"training.{_name}"] = f"monitor.{_name}"

# Canonical field -> accepted value -> canonical value.
SPELLINGS: Mapping[str, Mapping[Any, Any]] = {
    "precision.amp": {
        True: "fp16", False: "fp32", None: "fp32", "no": "fp32", "none": "fp32", "off": "fp32", "float32": "fp32",
        "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    },
    "precision.loss_scale": {0: "dynamic", None: "dynamic"},
    "clip.max_norm": {0: None},
    "clip.value": {0: None},
    "scheduler.name": {
        "cosine_with_warmup": "cosine", "linear": "polynomial", "linear_with_warmup": "polynomial",
        "inverse_square_root": "inverse_sqrt", "sqrt": "inverse_sqrt", "onecycle": "one_cycle",
        "reduce_on_plateau": "plateau", "multi_step": "multistep", "warmup_stable_decay": "wsd",
        "cosine_with_restarts": "cosine_restarts", "cosine_annealing_warm_restarts": "cosine_restarts",
        "none": "constant", None: "constant",
    },
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vision": {
        "optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.momentum": 0.9, "optimizer.nesterov": True,
        "optimizer.weight_decay": 5e-5, "scheduler.name": "cosine", "scheduler.warmup_ratio": 0.05,
        "ema.decay": 0.9999, "ema.warmup": True,
    },
    "nlp-finetune": {
        "optimizer.name": "adamw", "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.01,
        "scheduler.name": "polynomial", "scheduler.warmup_ratio": 0.06, "clip.max_norm": 1.0,
    },
    "pretrain-lm": {
        "optimizer.name": "lamb", "optimizer.lr": 2e-3, "optimizer.weight_decay": 0.01,
        "optimizer.no_decay": ["embeddings"], "scheduler.name": "inverse_sqrt", "scheduler.warmup_steps": 2000,
        "clip.max_norm": 1.0,
    },
}  # fmt: skip
_PAIRS = ("optimizer.betas", "optimizer.lr_range")
FINETUNE_RATES = (1e-5, 5e-5)
# (absolute value, share, what it is a share of): two ways to set one thing.
_SHARES = (
    ("scheduler.warmup_steps", "scheduler.warmup_ratio", "scheduler.total_steps"),
    ("scheduler.min_lr", "scheduler.min_lr_ratio", "optimizer.lr"),
)
_RIVALS = {a: b for a, b, _ in _SHARES} | {b: a for a, b, _ in _SHARES}
# Names of other tools that are too unlike ours to be found by their letters.
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}


class _Written(dict[str, str]):
    """The name under which each field was written; a field that nobody wrote goes by its own name."""

    def __missing__(self, field: str) -> str:
        return field


def load(source: Config | Mapping[str, Any] | str | Path, *, whole: bool = False) -> Config:
    """The typed configuration from a dict in either shape, a YAML file, or itself. An error names the field as it was
    written, in a file with line and column. With `whole` the configuration is complete: a field that nobody reads is an
    error then, and a schedule must have its length."""
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise ConfigError("there is no such file", where=str(path))
        document = Document(path)
        try:
            return load(document.content, whole=whole)
        except ConfigError as error:
            raise document.error(tuple(error.where.split(".")), error.what, error.hint) from error
    written = _Written()
    if isinstance(source, Config):
        config = source
    elif isinstance(source, Mapping):
        fields, written = canonical_fields(source)
        config = _validate(fields, written)
    else:
        raise ConfigError(f"expected a dict, the path of a YAML file or a Config, got {type(source).__name__}",
                          where="config")  # fmt: skip
    if whole:
        _check(config, written, length=config is not source)
    return config


def with_keywords(
    config: Config | Mapping[str, Any] | str | Path | None, fields: Mapping[str, Any]
) -> Config | Mapping[str, Any] | str | Path:
    """A configuration with what was given by keyword: sections, and fields by their last name (`log_interval`)."""
    if config is None:
        config = {}
    if not fields:
        return config
    if not isinstance(config, Mapping):
        name = next(iter(fields))
        raise ConfigError("keywords go with a dict, or alone", where=name, hint="write it into the configuration")
    merged = dict(config)
    for name, value in fields.items():
        # A section by its name, or a field by its last name.
        section = name
        if name not in SECTIONS and name not in ("preset", "mode"):
            section, _, field = _field_called(name).rpartition(".")
            value = {field: value}
        before, merged[section] = merged.get(section), value
        if before is None:
            continue
        twice = section
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[section] = {**before, **value}
            common = sorted(before.keys() & value.keys())
            if not common:
                continue
            twice = f"{section}.{common[0]}"
        raise ConfigError("it is in the configuration and among the keywords", where=twice, hint="keep one of the two")
    return merged


def _field_called(name: str) -> str:
    """The field of a name without its section."""
    written = [path for path in sorted(FIELDS | MOVES.keys()) if path.rpartition(".")[2] == name]
    fields = {MOVES.get(path, path) for path in written}
    if not fields:
        raise _unknown(name)
    if len(fields) > 1:
        raise ConfigError("several sections have such a field", where=name, hint=f"one of {', '.join(written)}")
    return fields.pop()


def normal_form(source: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that is given, by its one name and as its own type, over `defaults`: two ways of saying the same give
    the same dict. A default yields to its rival (warm-up as ratio or as steps)."""
    fields, written = canonical_fields(source)
    for path, value in defaults.items():
        if path not in fields and fields.get(_RIVALS.get(path, "")) is None:
            fields[path] = value
    config = _validate(fields, written)
    _check(config, written, length=False)
    values = config.model_dump(mode="json", exclude_unset=True)  # tuples as lists: what a key and a JSON file can hold
    return {path: values[path.partition(".")[0]][path.partition(".")[2]] for path in sorted(fields)}


def nested(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by path as sections."""
    out: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        section, _, name = path.partition(".")
        out.setdefault(section, {})[name] = value
    return out


def canonical_fields(source: Mapping[str, Any]) -> tuple[dict[str, Any], _Written]:
    """Every field by its one name (`clip.max_norm`), and the name it was written under."""
    fields: dict[str, Any] = {}
    written = _Written()
    preset = source.get("preset", source.get("mode"))
    if source.get("mode", preset) != preset:
        raise ConfigError("mode and preset are the same, and differ", where="mode", hint="keep preset")
    for path, value in _leaves({k: v for k, v in source.items() if k not in ("preset", "mode")}):
        target = MOVES.get(path, path)
        if target not in FIELDS:
            raise _unknown(path)
        value = _spelling(target, value)
        # Both shapes may say the same thing twice.
        if target in fields and not _same(fields[target], value):
            what = f"{written[target]} is {fields[target]!r} and {path} is {value!r}: both set {target}"
            raise ConfigError(what, where=path, hint="keep one of the two")
        fields[target] = value
        written[target] = path
    if preset is not None:
        _apply_preset(preset, fields, written)
    _check_shares(fields, written)
    return fields, written


def _check(config: Config, written: _Written, *, length: bool) -> None:
    """Refuses what would be ignored, or misses its length, before anything is made of the configuration."""
    try:
        _check_read(config)
        if length:
            _check_length(config, written)
    except ConfigError as error:
        raise ConfigError(error.what, where=written[error.where], hint=error.hint) from error


def _check_read(config: Config) -> None:
    rule = config.optimizer
    if rule.ignored:
        raise ConfigError(
            f"{rule.name} has no {rule.ignored}; it takes {rule.takes}", where=f"optimizer.{rule.ignored}"
        )
    for name in ("start_step", "warmup"):
        if "decay" not in config.ema.model_fields_set and getattr(config.ema, name):
            raise ConfigError("there is no average: EMA is off", where=f"ema.{name}",
                              hint="set ema.decay, for example to 0.999")  # fmt: skip
    if config.swa.share is not None and config.ema.on:
        raise ConfigError("SWA's average would ship, and EMA is on too", where="swa.share", hint="set ema.decay to 0")
    mode, better = config.scheduler.mode, config.monitor.better
    if mode is not None and better is not None and (mode == "max") is not (better == "higher"):
        what = f"scheduler.mode is {mode} and monitor.better is {better}: both say which metric is better"
        raise ConfigError(what, where="scheduler.mode", hint="keep one of the two")
    schedules.check_fields(config.scheduler)


def _check_length(config: Config, written: _Written) -> None:
    needs_length = {
        "swa.share": config.swa.share is not None,
        "pruning.end_step": config.pruning.method is not None and config.pruning.end_step is None,
    }
    for path, needs in needs_length.items():
        if needs and config.scheduler.total_steps is None:
            what = f"{path.partition('.')[0]} needs the length of the run"
            raise ConfigError(what, where=path, hint="set scheduler.total_steps")
    try:
        schedules.check_length(config.scheduler)
    except ConfigError as error:
        sources = [written[f"scheduler.{name}"] for name in ("warmup_ratio", "warmup_steps", "name")]
        preset = next((f", and the {source} asks for it" for source in sources if source.startswith("preset ")), "")
        raise ConfigError(error.what + preset, where=error.where, hint=error.hint) from error


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of nested sections by its path."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping) and path in FIELDS:
            hint = "write a list of rules: [{match: …, lr: …}]" if path == "optimizer.groups" else ""
            raise ConfigError("a mapping is given, and this field is no section", where=path, hint=hint)
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif path not in SECTIONS:
            yield path, value
        elif value is not None:  # a section left empty in YAML is None
            fields = sorted(_fields_of(path))
            example = f"{{{fields[0]}: …}}; its fields: {', '.join(fields)}"
            # Where a word alone says all that is needed, people write it without its section.
            choices: Mapping[str, Any] = {"optimizer": get_args(OptimizerName), "scheduler": get_args(SchedulerName)}
            if path in choices:
                example = f"{{name: {closest(str(value), choices[path]) or choices[path][0]}}}"
            raise ConfigError(f"expected a mapping, for example {path}: {example}; saw {value!r}", where=path)


def _words(annotation: Any) -> frozenset[str]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return frozenset(word for word in arguments if isinstance(word, str))
    return frozenset[str]().union(*map(_words, arguments))


# The words that each field accepts, in any case: known before pydantic compares them. None for a field of numbers.
NAMES: dict[str, frozenset[str]] = {}
for _section, _info in Config.model_fields.items():
    for _name, _field in getattr(_info.annotation, "model_fields", {}).items():
        NAMES[f"{_section}.{_name}"] = _words(_field.annotation)
FIELDS = frozenset(NAMES)
SECTIONS = frozenset(Config.model_fields) | {p.rpartition(".")[0] for p in MOVES}


def _fields_of(section: str) -> dict[str, str]:
    """The paths of a section's fields, as people write them, by their last part."""
    fields: dict[str, str] = {}
    for path in (*FIELDS, *MOVES, "preset"):
        parent, _, name = path.rpartition(".")
        if parent == section:
            fields[name] = path
    return fields


def _unknown(path: str) -> ConfigError:
    """The error for a field that does not exist, with the one that was probably meant."""
    names = [*sorted(FIELDS | MOVES.keys()), "preset"]
    section, _, last = path.rpartition(".")
    siblings = _fields_of(section)
    # The same field of another section, then its like in this one; of an unknown section the whole path's like.
    namesakes = [name for name in names if name.rpartition(".")[2] == last]
    nearest = closest(path, namesakes, 0) or siblings.get(closest(last, siblings), "")
    if last in _OTHER_NAMES:
        nearest = siblings.get(_OTHER_NAMES[last], f"optimizer.{_OTHER_NAMES[last]}")
    if not nearest and section not in SECTIONS:
        nearest = closest(path, [*SECTIONS, *names] if not section else names)
    valid = sorted(siblings) if section in SECTIONS else [*sorted(SECTIONS), "preset"]
    advice = f"did you mean {nearest!r}?" if nearest else f"valid names: {', '.join(valid)}"
    return ConfigError("no such field", where=path, hint=advice)


def _spelling(target: str, value: Any) -> Any:
    """The canonical value for an accepted one; other values unchanged."""
    key = value.lower() if isinstance(value, str) else value
    if isinstance(key, str) and key in NAMES[target]:
        return key
    if isinstance(key, str | bool | int | float | None):
        return SPELLINGS.get(target, {}).get(key, value)
    return value


def _same(a: Any, b: Any) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-12)
    except (TypeError, ValueError):
        return bool(a == b)


def _apply_preset(preset: Any, fields: dict[str, Any], written: _Written) -> None:
    """Adds the fields of a preset that nobody wrote."""
    if isinstance(preset, str):
        preset = preset.lower()
    if preset not in PRESETS:
        raise ConfigError(f"no preset is called {preset!r}", where="preset", hint=hint(str(preset), PRESETS))
    own_optimizer = "optimizer.name" in fields and fields["optimizer.name"] != PRESETS[preset]["optimizer.name"]
    for target, value in PRESETS[preset].items():
        # The preset's rate and momentum belong to its own optimizer; its warm-up yields to either way of saying it.
        if target in fields or _RIVALS.get(target) in fields or (own_optimizer and target.startswith("optimizer.")):
            continue
        fields[target] = value
        written[target] = f"preset {preset}"
    if preset == "nlp-finetune" and "optimizer.lr_range" not in fields:  # of whatever optimizer
        fields["optimizer.lr_range"] = FINETUNE_RATES
        written["optimizer.lr_range"] = f"preset {preset}"
        # A rate that is scaled with the batch is clamped after the scaling, by lr_range.
        rate = _product(fields.get("optimizer.lr"), 1.0)
        if rate is not None and "optimizer.lr_scaling" not in fields:
            fields["optimizer.lr"] = min(max(rate, FINETUNE_RATES[0]), FINETUNE_RATES[1])


def _check_shares(fields: Mapping[str, Any], written: _Written) -> None:
    """Refuses an absolute value beside a share, unless they agree."""
    for absolute, share, whole in _SHARES:
        if fields.get(absolute) is None or fields.get(share) is None:
            continue
        expected = _product(fields[share], fields.get(whole))
        if expected is None or not _same(expected, fields[absolute]):
            what = f"{written[absolute]} is {fields[absolute]!r} and {written[share]} is {fields[share]!r}"
            raise ConfigError(what, where=written[share], hint="both set the same thing: keep one of the two")


def _product(a: Any, b: Any) -> float | None:
    try:
        return float(a) * float(b)
    except (TypeError, ValueError):
        return None


def _validate(fields: Mapping[str, Any], written: _Written) -> Config:
    """The typed configuration; pydantic's first error as one at the field's written name."""
    try:
        return Config.model_validate(nested(fields))
    except ValidationError as error:
        # One error at a time: later ones often follow from the first. An unknown name is most often a misspelling of
        # the missing one, and says more.
        first = min(error.errors(), key=lambda e: e["type"] == "missing")
        path = ".".join(str(part) for part in first["loc"][:2])
        inside = "" if path in _PAIRS else "".join(f".{part}" for part in first["loc"][2:])
        what = first["msg"].removeprefix("Value error, ")
        advice = ""
        if path in _PAIRS and first["type"] in ("missing", "too_long", "tuple_type"):
            what = f"expected two numbers, got {fields.get(path)!r}"
        elif first["type"] == "missing" and inside:
            inside, _, name = inside.rpartition(".")
            what = f"{name} is required, and missing"
        elif first["type"] == "extra_forbidden" and inside:
            what = "no such field"
            name = str(first["loc"][-1])
            advice = hint(_OTHER_NAMES.get(name, name), list(GroupRule.model_fields))
        elif first["type"] == "literal_error" and isinstance(first["input"], str):
            valid = re.findall(r"'([^']+)'", first["ctx"]["expected"])
            what = f"unknown value {first['input']!r}"
            advice = hint(first["input"], valid)
        elif "." in path:
            what += f", got {first['input']!r}"
        raise ConfigError(what, where=f"{written[path]}{inside}", hint=advice) from error
