"""Reads configurations: two common shapes of the same settings, presets, and errors that name the field. One table of
moves maps both shapes to the sections of `Config`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from layerline.pipeline.config.document import Document
from layerline.pipeline.config.validation_errors import mistake
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import closest, hint
from layerline.training.config import checks
from layerline.training.config.sections import Config, Section

# Accepted field -> canonical field.
MOVES: dict[str, str] = {
    "mode": "preset",
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
        "optimizer.lr_range": (1e-5, 5e-5),
    },
    "pretrain-lm": {
        "optimizer.name": "lamb", "optimizer.lr": 2e-3, "optimizer.weight_decay": 0.01,
        "optimizer.no_decay": ["embeddings"], "scheduler.name": "inverse_sqrt", "scheduler.warmup_steps": 2000,
        "clip.max_norm": 1.0,
    },
}  # fmt: skip
# (absolute value, share, what it is a share of): two ways to set one thing.
_SHARES = (
    ("scheduler.warmup_steps", "scheduler.warmup_ratio", "scheduler.total_steps"),
    ("scheduler.min_lr", "scheduler.min_lr_ratio", "optimizer.lr"),
)
_RIVALS = {a: b for a, b, _ in _SHARES} | {b: a for a, b, _ in _SHARES}
# Names of other tools that are too unlike ours to be found by their letters.
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}
FULLY_SHARD = "call torch's fully_shard on the model's layers and on the model before ModelOptimizer"
# Words with which other tools ask for a split model.
_SPLITTING = frozenset({"fsdp", "fsdp2", "deepspeed", "fairscale", "sharding"})


class _Written(dict[str, str]):
    """The name under which each field was written; a field that nobody wrote goes by its own name."""

    def __missing__(self, field: str) -> str:
        return field


def load(source: object, *, keywords: Mapping[str, Any] | None = None, whole: bool = False) -> Config:
    """The typed configuration from a dict in either shape, a YAML file, or itself.

    Args:
        source: a mapping, the path of a YAML file, or a Config.
        keywords: sections, and fields by their last name (`log_interval`), besides a dict.
        whole: the configuration is complete: a field that nobody reads is an error then, and so is a schedule without
            its length.

    Raises:
        ConfigError: names the field as it was written, in a file with line and column.
    """
    if keywords and not isinstance(source, Mapping):
        raise ConfigError("keywords go with a dict, or alone", where=next(iter(keywords)),
                          hint="write it into the configuration")  # fmt: skip
    if isinstance(source, str | Path):
        return _from_file(Path(source), whole=whole)
    written = _Written()
    if isinstance(source, Config):
        config = source
    elif isinstance(source, Mapping):
        fields, written = canonical_fields(source, keywords)
        config = _validate(fields, written)
    else:
        what = f"expected a dict, the path of a YAML file or a Config, got {type(source).__name__}"
        raise ConfigError(what, where="config")
    if whole:
        _check(config, written, length=True)
    return config


def _from_file(path: Path, *, whole: bool) -> Config:
    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path))
    document = Document(path)
    try:
        return load(document.content, whole=whole)
    except ConfigError as error:
        raise document.error(tuple(error.where.split(".")), error.what, error.hint) from error


def normal_form(source: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that is given, by its one name and as its own type, over `defaults`: two ways of saying the same give
    the same dict. A default yields to its rival (warm-up as ratio or as steps)."""
    fields, written = canonical_fields(source)
    for path, value in defaults.items():
        if path not in fields and fields.get(_RIVALS.get(path, "")) is None:
            fields[path] = value
    config = _validate(fields, written)
    _check(config, written, length=False)
    # JSON's types (lists for tuples): what a key and a file can hold.
    values = dict(_leaves(config.model_dump(mode="json", exclude_unset=True)))
    return {path: values[path] for path in sorted(fields)}


def nested(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by path as sections."""
    out: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        section, _, name = path.partition(".")
        out.setdefault(section, {})[name] = value
    return out


def canonical_fields(
    source: Mapping[str, Any], keywords: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], _Written]:
    """Every field by its one name (`clip.max_norm`), and the name it was written under."""
    entries = list(_leaves(source))
    for name, value in (keywords or {}).items():
        entries += _leaves({name if name in SECTIONS else _field_called(name): value})
    fields: dict[str, Any] = {}
    written = _Written()
    for path, value in entries:
        target = MOVES.get(path, path)
        if target not in FIELDS:
            raise _unknown(path)
        value = _spelling(target, value)
        # Both shapes, or a keyword beside them, may say the same thing twice.
        if target in fields and not _same(fields[target], value):
            what = f"{written[target]} is {fields[target]!r} and {path} is {value!r}: both set {target}"
            raise ConfigError(what, where=path, hint="keep one of the two")
        fields[target] = value
        written[target] = path
    preset = fields.pop("preset", None)  # no field of Config
    if preset is not None:
        _apply_preset(preset, fields, written)
    _check_shares(fields, written)
    return fields, written


def _field_called(name: str) -> str:
    """The field of a name without its section."""
    paths = [path for path in sorted(FIELDS | MOVES.keys()) if path.rpartition(".")[2] == name]
    fields = {MOVES.get(path, path) for path in paths}
    if not fields:
        raise _unknown(name)
    if len(fields) > 1:
        raise ConfigError("several sections have such a field", where=name, hint=f"one of {', '.join(paths)}")
    return fields.pop()


def _check(config: Config, written: _Written, *, length: bool) -> None:
    """The checks of the whole configuration, in the names that were written."""
    try:
        checks.check(config, length=length)
    except ConfigError as error:
        what = error.what
        if error.where == "scheduler.total_steps":
            # The schedule may be the user's, and the warm-up the preset's.
            needing = ["scheduler.warmup_ratio"]
            if config.scheduler.name in checks.NEED_TOTAL:
                needing.append("scheduler.name")
            presets = [written[path] for path in needing if written[path].startswith("preset ")]
            if presets:
                what += f", and the {presets[0]} asks for it"
        raise ConfigError(what, where=written[error.where], hint=error.hint) from error


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
            raise _no_section(path, value)


def _no_section(path: str, value: Any) -> ConfigError:
    """The error for a value where a section is expected, with an example."""
    names = sorted(_fields_of(path))
    example = f"{{{names[0]}: …}}; its fields: {', '.join(names)}"
    if f"{path}.name" in FIELDS:
        # A word alone would be enough here, so people write it without its section.
        default = Config.model_fields[path].default.name
        example = f"{{name: {closest(str(value), NAMES[f'{path}.name']) or default}}}"
    return ConfigError(f"expected a mapping, for example {path}: {example}; saw {value!r}", where=path)


def _words(annotation: Any) -> frozenset[str]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return frozenset(word for word in arguments if isinstance(word, str))
    return frozenset[str]().union(*map(_words, arguments))


# The words that each field accepts, in any case: known before pydantic compares them. None for a field of numbers.
NAMES: dict[str, frozenset[str]] = {"preset": frozenset(PRESETS)}
for _section, _info in Config.model_fields.items():
    for _name, _field in getattr(_info.annotation, "model_fields", {}).items():
        NAMES[f"{_section}.{_name}"] = _words(_field.annotation)
FIELDS = frozenset(NAMES)
SECTIONS = frozenset(Config.model_fields) | {p.rpartition(".")[0] for p in MOVES if "." in p}


def _fields_of(section: str) -> dict[str, str]:
    """The paths of a section's fields, as people write them, by their last part."""
    fields: dict[str, str] = {}
    for path in FIELDS | MOVES.keys():
        parent, _, name = path.rpartition(".")
        if parent == section:
            fields[name] = path
    return fields


def _unknown(path: str) -> ConfigError:
    """The error for a field that does not exist, with the one that was probably meant."""
    if _splits_the_model(path):
        what = "the configuration splits no model over the ranks"
        return ConfigError(what, where=path, hint=f"{FULLY_SHARD}, which uses it as it is")
    names = sorted(FIELDS | MOVES.keys())
    section, _, last = path.rpartition(".")
    siblings = _fields_of(section)
    # The same field of another section comes first, then a similar one of this section.
    namesakes = [name for name in names if name.rpartition(".")[2] == last]
    nearest = closest(path, namesakes, 0) or siblings.get(closest(last, siblings), "")
    if last in _OTHER_NAMES:
        nearest = siblings.get(_OTHER_NAMES[last], f"optimizer.{_OTHER_NAMES[last]}")
    valid = sorted(siblings)
    if section not in SECTIONS:
        valid = [*sorted(SECTIONS), "preset"]
        nearest = nearest or closest(path, [*valid, *names])
    advice = f"valid names: {', '.join(valid)}"
    if nearest:
        advice = f"did you mean {nearest!r}?"
    return ConfigError("no such field", where=path, hint=advice)


def _splits_the_model(path: str) -> bool:
    """Whether the name asks for weights or optimizer state that are split over the ranks."""
    for word in re.split(r"[._]", path.lower()):
        if word in _SPLITTING or re.fullmatch(r"zero[123]?|shard(ed|s)?", word):
            return True
    return False


def _spelling(target: str, value: Any) -> Any:
    """The canonical value for an accepted one; other values unchanged."""
    spellings = SPELLINGS.get(target, {})
    if isinstance(value, str):
        spellings = {**spellings, **{word: word for word in NAMES[target]}}
        return spellings.get(value.lower(), value)
    if isinstance(value, bool | int | float | None):
        return spellings.get(value, value)
    return value


def _same(a: Any, b: Any) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-12)  # "1e-3" and 0.001 say the same
    except (TypeError, ValueError):
        return bool(a == b)


def _apply_preset(preset: Any, fields: dict[str, Any], written: _Written) -> None:
    """Adds the fields of a preset that nobody wrote."""
    name = str(preset)
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {preset!r}", where="preset", hint=hint(name, PRESETS))
    preset_values = PRESETS[name]
    same_optimizer = fields.get("optimizer.name") in (None, preset_values["optimizer.name"])
    for target, value in preset_values.items():
        # The preset's rate and momentum belong to its own optimizer; the range of rates is for any.
        its_own = target.startswith("optimizer.") and target != "optimizer.lr_range"
        # Its warm-up yields to either way of saying it.
        if target in fields or _RIVALS.get(target) in fields or (its_own and not same_optimizer):
            continue
        fields[target] = value
        written[target] = f"preset {name}"


def _check_shares(fields: Mapping[str, Any], written: _Written) -> None:
    """Refuses an absolute value beside a share, unless they agree."""
    for absolute, share, whole in _SHARES:
        if fields.get(absolute) is None or fields.get(share) is None:
            continue
        try:
            agrees = _same(float(fields[share]) * float(fields[whole]), fields[absolute])
        except (KeyError, TypeError, ValueError):
            agrees = False
        if not agrees:
            what = f"{written[absolute]} is {fields[absolute]!r} and {written[share]} is {fields[share]!r}"
            raise ConfigError(what, where=written[share], hint="both set the same thing: keep one of the two")


def _validate(fields: Mapping[str, Any], written: _Written) -> Config:
    """The typed configuration; the first mistake is an error at the field's written name."""
    sections = nested(fields)
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        first = mistake(Config, sections, error)
        place = [str(part) for part in first.place]
        path = ".".join(place[:2])
        inside = "".join(f".{part}" for part in place[2:])
        advice = first.hint
        if place[-1] in _OTHER_NAMES:
            advice = f"did you mean {_OTHER_NAMES[place[-1]]!r}?"
        raise ConfigError(first.what, where=f"{written[path]}{inside}", hint=advice) from error
