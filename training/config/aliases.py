"""Reads configurations: two common shapes of the same settings, presets, and errors that name the field.

Shape one has clipping, EMA, precision and intervals under `training`; shape two has them in `precision`, `gpu` and
`distributed`. One table of moves maps both to the sections of `Config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import closest
from layerline.training.config.sections import Config, OptimizerName, SchedulerName, Section
from layerline.training.optimizers import schedules

# Accepted field -> canonical field.
MOVES: Mapping[str, str] = {
    "optimizer.grad_clip.max_norm": "clip.max_norm",
    "optimizer.grad_clip.value": "clip.value",
    "training.grad_clip_norm": "clip.max_norm",
    "training.grad_clip_value": "clip.value",
    "training.ema_decay": "ema.decay",
    "training.ema_start_step": "ema.start_step",
    "training.ema_warmup": "ema.warmup",
    "training.mixed_precision": "precision.amp",
    "training.accumulate_steps": "accumulate.steps",
    "training.log_interval": "monitor.log_interval",
    "training.save_interval": "monitor.save_interval",
    "training.save_dir": "monitor.save_dir",
    "training.valid_interval": "monitor.valid_interval",
    "training.keep_best": "monitor.keep_best",
    "training.early_stop": "monitor.early_stop",
    "gpu.gradient_accumulation_steps": "accumulate.steps",
    "gpu.checkpointing": "memory.checkpointing",
    "gpu.checkpoint_interval": "memory.checkpoint_interval",
    "gpu.enable_memory_compact": "memory.empty_cache",
    "distributed.gradient_bucket_size_mb": "distributed.bucket_mb",
    "distributed.overlap_communication": "distributed.overlap",
}

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
_EXCLUSIVE = (("scheduler.warmup_ratio", "scheduler.warmup_steps"), ("scheduler.min_lr", "scheduler.min_lr_ratio"))
_RIVALS = dict(_EXCLUSIVE) | {second: first for first, second in _EXCLUSIVE}


def load(source: Config | Mapping[str, Any] | str | Path, *, whole: bool = False) -> Config:
    """The typed configuration from a dict in either shape, a YAML file, or itself.

    Args:
        source: the configuration.
        whole: whether it is complete: a field that nobody reads is an error then, and a schedule must have its length.

    Raises:
        ConfigError: unknown field (with the nearest one), wrong value, or two fields that contradict each other; of a
            file with line and column.
    """
    if isinstance(source, Config):
        if whole:
            _check_read(source, {})
        return source
    if isinstance(source, str | Path):
        return _load_file(Path(source), whole=whole)
    if not isinstance(source, Mapping):
        raise ConfigError(f"expected a dict, the path of a YAML file or a Config, got {type(source).__name__}",
                          where="config")  # fmt: skip
    fields, written = canonical_fields(source)
    config = _validate(fields, written)
    if whole:
        _check_read(config, written)
        _check_length(config, written)
    return config


def with_keywords(
    config: Config | Mapping[str, Any] | str | Path | None, fields: Mapping[str, Any]
) -> Config | Mapping[str, Any] | str | Path:
    """A configuration with what was given by keyword: sections, and fields by their last name (`log_interval`).

    Raises:
        ConfigError: a name that is no field, or one of several sections; keywords beside a file or a Config; a field
            that is given twice.
    """
    if config is None:
        config = {}
    if not fields:
        return config
    if not isinstance(config, Mapping):
        name = next(iter(fields))
        raise ConfigError("keywords go with a dict, or alone", where=name, hint="write it into the configuration")
    merged = dict(config)
    for name, value in fields.items():
        _merge(merged, name, value)
    return merged


def _merge(config: dict[str, Any], name: str, value: Any) -> None:
    """Puts one keyword into a configuration."""
    if name not in SECTIONS and name not in ("preset", "mode"):
        name, field = _home(name)
        value = {field: value}
    before = config.get(name)
    if before is None:
        config[name] = value
        return
    if not isinstance(before, Mapping) or not isinstance(value, Mapping):
        raise ConfigError("it is in the configuration and among the keywords", where=name, hint="keep one of the two")
    twice = sorted(set(before) & set(value))
    if twice:
        raise ConfigError(
            "it is in the configuration and among the keywords", where=f"{name}.{twice[0]}", hint="keep one of the two"
        )
    config[name] = {**before, **value}


def _home(name: str) -> tuple[str, str]:
    """Section and field of a name without its section."""
    written = [p for p in sorted(FIELDS | set(MOVES)) if p.rpartition(".")[2] == name]
    meant = {MOVES.get(p, p) for p in written}
    if len(meant) == 1:
        section, _, field = meant.pop().rpartition(".")
        return section, field
    if written:
        raise ConfigError("several sections have such a field", where=name, hint=f"one of {', '.join(written)}")
    raise _unknown(name)


def normal_form(source: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that is given, by its one name and as its own type, over `defaults`: two ways of saying the same give
    the same dict. A default yields to its rival (warm-up as ratio or as steps).

    Raises:
        ConfigError: as `load`.
    """
    fields, written = canonical_fields(source)
    for path, value in defaults.items():
        if path not in fields and fields.get(_RIVALS.get(path, "")) is None:
            fields[path], written[path] = value, path
    config = _validate(fields, written)
    _check_read(config, written)
    return {p: _plain(getattr(getattr(config, p.partition(".")[0]), p.partition(".")[2])) for p in sorted(fields)}


def nested(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by path as sections."""
    out: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        section, _, name = path.partition(".")
        out.setdefault(section, {})[name] = value
    return out


def canonical_fields(source: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Every field by its one name (`clip.max_norm`), and the name it was written under."""
    fields: dict[str, Any] = {}
    written: dict[str, str] = {}
    preset = _preset_of(source)
    for path, value in _leaves({k: v for k, v in source.items() if k not in ("preset", "mode")}):
        target = MOVES.get(path, path)
        if target not in FIELDS:
            raise _unknown(path)
        value = _spelling(target, value)
        if target in fields and not _same(fields[target], value):
            raise ConfigError(
                f"{written[target]} is {fields[target]!r} and {path} is {value!r}: both set {target}",
                where=path,
                hint="keep one of the two",
            )
        fields[target], written[target] = value, path
    if preset is not None:
        _apply_preset(preset, fields, written)
    _check_exclusive(fields, written)
    return fields, written


def _load_file(path: Path, *, whole: bool) -> Config:
    """As `load`, its errors at the place in the file."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        text = path.read_text("utf-8")
        raw, tree = YAML(typ="safe").load(text), YAML(typ="rt").load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 text: {error}", where=path.name) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = str(error.problem or error.context).split("\n")[0]
        raise ConfigError(f"not valid YAML: {problem}", where=f"{path.name}{place}") from error
    except YAMLError as error:
        raise ConfigError(f"not valid YAML: {str(error).splitlines()[0]}", where=path.name) from error
    if raw is None:
        return load({}, whole=whole)  # an empty file asks for nothing
    if not isinstance(raw, Mapping):
        raise ConfigError(f"holds {type(raw).__name__}, expected sections with fields", where=path.name)
    try:
        return load(raw, whole=whole)
    except ConfigError as error:
        place = f"{path.name}:{_position(tree, error.where)}"
        raise ConfigError(f"{error.where}: {error.what}", where=place, hint=error.hint) from error


def _position(tree: Any, field: str) -> str:
    """Line and column of a field, or of the innermost section that is there."""
    position = (0, 0)
    for key in field.split("."):
        marks = getattr(getattr(tree, "lc", None), "data", None) or {}
        if key not in marks:
            break
        position, tree = tuple(marks[key][:2]), tree[key]
    return f"{position[0] + 1}:{position[1] + 1}"


def _check_read(config: Config, written: Mapping[str, str]) -> None:
    """What optimizer, schedule or average would ignore is an error here already, before anything is made of it."""
    rule = config.optimizer
    if rule.ignored:
        path = f"optimizer.{rule.ignored}"
        raise ConfigError(f"{rule.name} has no {rule.ignored}; it takes {rule.takes}", where=written.get(path, path))
    for name in ("start_step", "warmup"):
        if "decay" not in config.ema.model_fields_set and getattr(config.ema, name):
            raise ConfigError("there is no average: EMA is off", where=written.get(f"ema.{name}", f"ema.{name}"),
                              hint="set ema.decay, for example to 0.999")  # fmt: skip
    if config.swa.share is not None and config.ema.on:
        path = written.get("swa.share", "swa.share")
        raise ConfigError("SWA's average would ship, and EMA is on too", where=path, hint="set ema.decay to 0")
    try:
        schedules.check_fields(config.scheduler)
    except ConfigError as error:
        raise ConfigError(error.what, where=written.get(error.where, error.where), hint=error.hint) from error


def _check_length(config: Config, written: Mapping[str, str]) -> None:
    asks = {"swa.share": config.swa.share is not None,
            "pruning.end_step": config.pruning.method is not None and config.pruning.end_step is None}  # fmt: skip
    for path, missing in asks.items():
        if missing and config.scheduler.total_steps is None:
            raise ConfigError(f"{path.partition('.')[0]} needs the length of the run", where=written.get(path, path),
                              hint="set scheduler.total_steps")  # fmt: skip
    try:
        schedules.check_length(config.scheduler)
    except ConfigError as error:
        what = error.what
        for name in ("warmup_ratio", "warmup_steps", "name"):
            source = written.get(f"scheduler.{name}", "")
            if source.startswith("preset "):
                what += f", and the {source} asks for it"
                break
        raise ConfigError(what, where=error.where, hint=error.hint) from error


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif value is None and path in SECTIONS:
            continue  # a section left empty in YAML
        elif path in SECTIONS:
            raise ConfigError(f"expected a mapping, {_example(path, value)}; saw {value!r}", where=path)
        else:
            yield path, value


def _names(annotation: Any) -> frozenset[str]:
    """The words that a field accepts, in any case."""
    if get_origin(annotation) is Literal:
        return frozenset(word for word in get_args(annotation) if isinstance(word, str))
    return frozenset[str]().union(*map(_names, get_args(annotation)))


def _known() -> dict[str, frozenset[str]]:
    fields: dict[str, frozenset[str]] = {}
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        fields |= {f"{section}.{name}": _names(field.annotation) for name, field in model.model_fields.items()}
    return fields


NAMES = _known()
FIELDS = frozenset(NAMES)
SECTIONS = frozenset(Config.model_fields) | {p.rpartition(".")[0] for p in MOVES}


def _example(section: str, value: Any) -> str:
    """The mapping that was probably meant by a value alone."""
    fields = sorted(n.rpartition(".")[2] for n in FIELDS | set(MOVES) if n.rpartition(".")[0] == section)
    known: Mapping[str, Any] = {"optimizer": get_args(OptimizerName), "scheduler": get_args(SchedulerName)}
    if section not in known:
        return f"for example {section}: {{{fields[0]}: …}}; its fields: {', '.join(fields)}"
    near = closest(str(value), known[section])
    return f"for example {section}: {{name: {near or known[section][0]}}}"


def _unknown(path: str) -> ConfigError:
    names = [*sorted(FIELDS | set(MOVES)), "preset"]
    section, _, last = path.rpartition(".")
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == section}
    # The same field of another section, then its like in this one; of an unknown section the whole path's like.
    same = [n for n in names if n.rpartition(".")[2] == last]
    nearest = closest(path, same, 0) or siblings.get(closest(last, siblings), "")
    if not nearest and section not in SECTIONS:
        nearest = closest(path, names)
    valid = sorted(siblings) if section in SECTIONS else [*sorted(SECTIONS), "preset"]
    return ConfigError("no such field", where=path, hint=guess(nearest, valid))


def guess(nearest: str, valid: Sequence[str]) -> str:
    """The hint after a name that is not known: the one that was meant, or all there are."""
    return f"did you mean {nearest}?" if nearest else f"valid names: {', '.join(valid)}"


def _spelling(target: str, value: Any) -> Any:
    """The canonical value for an accepted one; other values unchanged."""
    table = SPELLINGS.get(target, {})
    key = value.lower() if isinstance(value, str) else value
    if isinstance(key, str) and key in NAMES.get(target, ()):
        return key
    if isinstance(key, str | bool | int | float | None) and key in table:
        return table[key]
    return value


def _same(a: Any, b: Any) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-12)
    except (TypeError, ValueError):
        return bool(a == b)


def _preset_of(source: Mapping[str, Any]) -> Any:
    """`preset`, which some write as `mode`."""
    if "mode" in source and "preset" in source and source["mode"] != source["preset"]:
        raise ConfigError("mode and preset are the same, and differ", where="mode", hint="keep preset")
    return source.get("preset", source.get("mode"))


def _apply_preset(preset: Any, fields: dict[str, Any], written: dict[str, str]) -> None:
    if isinstance(preset, str):
        preset = preset.lower()
    if preset not in PRESETS:
        hint = guess(closest(str(preset), PRESETS), list(PRESETS))
        raise ConfigError(f"no preset is called {preset!r}", where="preset", hint=hint)
    own_optimizer = "optimizer.name" in fields and fields["optimizer.name"] != PRESETS[preset]["optimizer.name"]
    for target, value in PRESETS[preset].items():
        # The preset's rate and momentum belong to its own optimizer; its warm-up yields to either way of saying it.
        if target in fields or _RIVALS.get(target) in fields or (own_optimizer and target.startswith("optimizer.")):
            continue
        fields[target], written[target] = value, f"preset {preset}"
    if preset == "nlp-finetune":  # of whatever optimizer
        fields.setdefault("optimizer.lr_range", FINETUNE_RATES)
        written.setdefault("optimizer.lr_range", f"preset {preset}")
        rate = _product(fields.get("optimizer.lr"), 1.0)
        if rate is not None and fields["optimizer.lr_range"] == FINETUNE_RATES and "optimizer.lr_scaling" not in fields:
            fields["optimizer.lr"] = min(max(rate, FINETUNE_RATES[0]), FINETUNE_RATES[1])


def _check_exclusive(fields: Mapping[str, Any], written: Mapping[str, str]) -> None:
    for one, other in _EXCLUSIVE:
        if fields.get(one) is None or fields.get(other) is None:
            continue
        # A share and an absolute value may both be there where they agree.
        if one == "scheduler.min_lr":
            absolute = fields[one]
            expected = _product(fields[other], fields.get("optimizer.lr"))
        else:
            absolute = fields[other]
            expected = _product(fields[one], fields.get("scheduler.total_steps"))
        if expected is None or not _same(expected, absolute):
            raise ConfigError(
                f"{written[one]} is {fields[one]!r} and {written[other]} is {fields[other]!r}",
                where=written[other],
                hint="both set the same thing: keep one of the two",
            )


def _plain(value: Any) -> Any:
    """Tuples as lists and sections as dicts: what a key and a JSON file can hold."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _product(a: Any, b: Any) -> float | None:
    try:
        return float(a) * float(b)
    except (TypeError, ValueError):
        return None


def _validate(fields: Mapping[str, Any], written: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(nested(fields))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(p) for p in first["loc"][:2])
        message = first["msg"].removeprefix("Value error, ")
        if path in _PAIRS and first["type"] in ("missing", "too_long", "tuple_type"):
            value = fields.get(path)
            raise ConfigError(f"expected two numbers, got {value!r}", where=written.get(path, path)) from error
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            valid = re.findall(r"'([^']+)'", first["ctx"]["expected"])
            raise ConfigError(
                f"unknown value {first['input']!r}",
                where=written.get(path, path),
                hint=guess(closest(first["input"], valid), valid),
            ) from error
        if "." in path:
            message += f", got {first['input']!r}"
        raise ConfigError(message, where=written.get(path, path)) from error
