"""The configuration of training as frozen, typed sections. `aliases` brings what people write into this form. This
module imports no torch: `pipe.yaml` is checked with it before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

OptimizerName = Literal[
    "sgd", "rmsprop", "adam", "adamw", "adafactor", "lamb", "lion", "muon", "custom",
]  # fmt: skip
SchedulerName = Literal[
    "constant", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt", "one_cycle", "step", "multistep",
    "exponential", "wsd", "plateau",
]  # fmt: skip
# Arguments that only some update rules read, and which of them each one takes.
RULE_FIELDS = ("betas", "eps", "momentum", "nesterov", "alpha")
_TAKEN: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"), "rmsprop": ("alpha", "eps", "momentum"), "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"), "adafactor": (), "lamb": ("betas", "eps"), "lion": ("betas",),
    "muon": ("momentum", "nesterov", "eps"),
}  # fmt: skip
Amp = Literal["fp32", "bf16", "fp16"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


def _two(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected two numbers")
    return value


Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_two)]


class Section(BaseModel):
    """Frozen. An unknown field is an error, and so is True where a number is meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        takes_bool = annotation is bool or bool in get_args(annotation)
        # A pair of numbers is checked element by element.
        has_true = value is True or (isinstance(value, list | tuple) and any(v is True for v in value))
        if has_true and not takes_bool:
            raise ValueError("expected a number")
        return value


class _Switched(Section):
    """A section that is off while its first field is None; the others are refused then."""

    @model_validator(mode="after")
    def _is_on(self) -> _Switched:
        switch = next(iter(type(self).model_fields))
        others = sorted(self.model_fields_set - {switch})
        if getattr(self, switch) is None and others:
            raise ValueError(f"{others[0]} needs {switch}")
        return self


class _RuleFields(Section):
    """What an update rule may read, of the whole model or of some parameters."""

    weight_decay: NonNegative | None = None
    betas: Betas | None = None
    eps: PositiveFloat | None = None
    momentum: Beta | None = None  # sgd, rmsprop and muon
    nesterov: bool | None = None  # sgd and muon
    alpha: Beta | None = None  # rmsprop: smoothing of the squared gradient

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields of the update rule that are set."""
        names = [name for name in RULE_FIELDS if getattr(self, name, None) is not None]
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _has_momentum(self) -> _RuleFields:
        if self.nesterov and not self.momentum and getattr(self, "name", "") == "sgd":
            raise ValueError("nesterov needs momentum above 0")
        return self


class GroupRule(_RuleFields):
    """Update rule, rate and weight decay of the parameters whose names match a pattern."""

    match: str  # glob pattern over parameter names: `head.*`, `*.bias`
    name: OptimizerName | None = None  # another update rule; muon leaves what is no matrix to the next rule
    lr: PositiveFloat | None = None  # base rate; it follows the same schedule
    lr_scale: NonNegative | None = None  # or a multiple of `optimizer.lr`; 0 freezes them

    @field_validator("name", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _says_something_once(self) -> GroupRule:
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError("give lr or lr_scale, not both")
        if self.name is None and self.lr is None and self.lr_scale is None and self.weight_decay is None:
            raise ValueError("a rule needs name, lr, lr_scale or weight_decay")
        if self.name == "custom":
            raise ValueError("custom steps the whole model")
        for field in self.arguments:
            if self.name is None:
                raise ValueError(f"{field} needs name")
            if field not in _TAKEN[self.name]:
                raise ValueError(f"{field} is not for {self.name}")
        return self


class OptimizerConfig(_RuleFields):
    """Which update rule. A field left out takes the rule's own default (`mo.plan()` prints it)."""

    name: OptimizerName = "adamw"
    lr: PositiveFloat = 1e-3
    no_decay: tuple[str, ...] = ()  # "embeddings" or glob patterns, besides biases, norms and 1-D parameters
    groups: tuple[GroupRule, ...] = ()  # the first rule that matches a parameter applies
    # The last block trains at this share of `lr`, each block before it at this share again.
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    lr_range: Annotated[tuple[PositiveFloat, PositiveFloat], BeforeValidator(_two)] | None = None  # bounds of `lr`

    @model_validator(mode="after")
    def _range_is_in_order(self) -> OptimizerConfig:
        if self.lr_range is not None and self.lr_range[0] > self.lr_range[1]:
            raise ValueError("lr_range is (lowest, highest)")
        return self

    @property
    def rules(self) -> set[str]:
        """The names of all update rules that are asked for."""
        return {self.name, *(group.name for group in self.groups if group.name is not None)}

    @property
    def ignored(self) -> str:
        """The first field given that this rule does not read; empty where it reads all of them."""
        taken = _TAKEN.get(self.name, RULE_FIELDS)
        return next((name for name in self.arguments if name not in taken), "")

    @property
    def takes(self) -> str:
        """The fields that this rule reads, in words."""
        return ", ".join(("lr", "weight_decay", *_TAKEN.get(self.name, ())))

    @property
    def base_lr(self) -> float:
        """`lr`, brought into `lr_range`."""
        if self.lr_range is None:
            return self.lr
        low, high = self.lr_range
        return min(max(self.lr, low), high)


class SchedulerConfig(Section):
    """The learning rate over the steps."""

    name: SchedulerName = "constant"
    warmup_ratio: Fraction | None = None
    warmup_steps: Count | None = None
    warmup_start: Fraction | None = None  # share of the base rate at the first update; None: 1 / warmup_steps
    min_lr: NonNegative | None = None
    min_lr_ratio: Fraction | None = None
    total_steps: PositiveInt | None = None  # optimizer steps in the whole run
    power: PositiveFloat = 1.0  # polynomial
    step_size: PositiveInt | None = None  # step: steps between two decays
    milestones: tuple[PositiveInt, ...] | None = None  # multistep: the steps at which the rate decays
    gamma: Annotated[float, Field(gt=0, le=1)] | None = None  # step and multistep (0.1), exponential (0.999 a step)
    # Count from the start of the run instead of the end of the warm-up; None: step and multistep do.
    count_warmup: bool | None = None
    period: PositiveInt | None = None  # cosine_restarts: steps until the first restart
    period_mult: PositiveInt = 1  # cosine_restarts: length of a period over that of the one before
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1  # wsd: share of the run in which the rate falls
    div_factor: PositiveFloat = 25.0  # one_cycle: peak / first rate
    final_div_factor: PositiveFloat = 1e4  # one_cycle: first / last rate
    cycle_momentum: bool = True  # one_cycle: momentum (or the first beta) falls while the rate rises
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1  # plateau
    patience: Count = 10  # plateau: validations without improvement that are waited for
    threshold: NonNegative = 1e-4  # plateau: relative improvement that counts
    mode: Literal["max", "min"] | None = None  # plateau: the same decision as `monitor.better`


class ClipConfig(Section):
    """Gradient clipping by total norm or by value; off while both are None or 0."""

    max_norm: PositiveFloat | None = None
    value: PositiveFloat | None = None  # greatest absolute value of each gradient's elements

    @model_validator(mode="after")
    def _one_of_two(self) -> ClipConfig:
        if self.max_norm is not None and self.value is not None:
            raise ValueError("clip by max_norm or by value, not both")
        return self


class EmaConfig(Section):
    """Exponential moving average of the weights; off while decay is None or 0."""

    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    start_step: Count = 0
    # True: min(decay, (1+n)/(10+n)) at update n. A number tau: decay * (1 - exp(-n/tau)).
    warmup: bool | PositiveFloat = False

    @property
    def on(self) -> bool:
        return bool(self.decay)


class SwaConfig(_Switched):
    """Stochastic weight averaging: the plain mean over the last share of the run ships (Izmailov et al. 2018)."""

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    lr: PositiveFloat | None = None  # constant rate in that share; None: the schedule's at its first step


class PruningConfig(_Switched):
    """Weights that are held at zero while training goes on around them."""

    # magnitude: the smallest of each layer. global: the smallest of all layers. 2:4: two of four input channels.
    # channels: whole output channels.
    method: Literal["magnitude", "global", "2:4", "channels"] | None = None
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5  # share of zeros at the end
    start_step: Count = 0  # optimizer step at which pruning begins; 2:4 is chosen here at once
    end_step: PositiveInt | None = None  # step at which the share is reached; None: half-way through the run
    every: PositiveInt = 100  # steps between two choices of what is pruned
    skip: tuple[str, ...] = ()  # glob patterns of parameters that stay whole; empty: channels spares the last layer

    @model_validator(mode="after")
    def _says_what_it_needs(self) -> PruningConfig:
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError("end_step lies after start_step")
        # Two of four: the pattern itself is the share.
        if self.method == "2:4" and self.share != 0.5:
            raise ValueError("2:4 has a share of 0.5")
        return self


class DistillationConfig(_Switched):
    """A second loss from the outputs of a trained model, which the task's `teacher()` gives (Hinton et al. 2015)."""

    alpha: Fraction | None = None  # share of the teacher's loss, T^2 * KL(teacher / T, student / T)
    temperature: PositiveFloat = 4.0  # T; higher shows more of the teacher's small probabilities
    axis: int | None = None  # axis of the classes; None: see loss.class_axis


class PrecisionConfig(Section):
    """Number formats; the loss scale serves fp16 alone."""

    amp: Amp = "fp32"
    master_weights: bool | None = None  # float32 masters of half parameters; None: wherever a parameter is half
    # A number alone stays as it is; with dynamic_loss_scale_window it is the first scale.
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    dynamic_loss_scale_window: PositiveInt | None = None  # accepted steps after which the scale doubles (2000)
    min_loss_scale: PositiveFloat = 1.0


class AccumulateConfig(Section):
    """Micro-batches per optimizer step."""

    steps: PositiveInt = 1
    # halve: a micro-batch that does not fit into memory runs in parts (`mo.train_step` and the `train` stage).
    on_oom: Literal["raise", "halve"] = "raise"


class MonitorConfig(Section):
    """What is watched and how often, in optimizer steps; 0 is never."""

    log_interval: Count = 10  # steps between two rows of the CSV
    valid_interval: Count = 0
    save_interval: Count = 0
    save_dir: str = "checkpoints"  # where `save_interval` puts its checkpoints
    keep: PositiveInt = 3  # checkpoints kept in a folder
    keep_best: Count = 0  # checkpoints with the best metric that are kept in the folder `best` of `save_dir`
    early_stop: PositiveInt | None = None  # validations without improvement after which `mo.should_stop` is true
    better: Literal["higher", "lower"] | None = None  # which metric is better; None: as `scheduler.mode`, else higher
    print: bool = False  # print a line each `log_interval` steps
    update_ratio: bool = True  # measure the relative change of the weights in the step that is logged
    per_layer: bool = False  # also the gradient norm of every parameter, as columns `grad_norm/<name>`


class NonFiniteConfig(Section):
    """What happens after a step whose loss or gradients are not finite. Such a step never reaches the weights."""

    policy: Literal["skip", "stop", "rollback"] = "skip"
    limit: PositiveInt = 10  # rejected steps in a row after which skip gives up and rollback rolls back
    triage: bool = False  # replay the first such step and name the module and tensor where it began

    @property
    def patience(self) -> int:
        """Rejected steps in a row that the policy answers."""
        return 1 if self.policy == "stop" else self.limit


class MemoryConfig(Section):
    """Trading time for memory."""

    checkpointing: bool = False  # recompute the layers of nn.Sequential and nn.ModuleList in the backward pass
    checkpoint_interval: PositiveInt = 4  # layers of a Sequential that are recomputed together


class DistributedConfig(Section):
    """How the ranks that a launcher started share the work; without a launcher nothing changes."""

    backend: Literal["nccl", "gloo"] | None = None  # None: ranks join only for a wrapped or split model
    bucket_mb: PositiveInt = 25  # gradients are reduced in pieces of this size
    overlap: bool = False  # no effect: gradients are reduced after the backward pass; other tools have this field
    compress: Literal["none", "fp16", "bf16"] = "none"  # the type in which gradients travel
    timeout_s: PositiveFloat = 600.0  # how long a rank waits for another before it names it


class Config(Section):
    """Everything ModelOptimizer does; by default it steps AdamW and watches."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    clip: ClipConfig = ClipConfig()
    ema: EmaConfig = EmaConfig()
    swa: SwaConfig = SwaConfig()
    pruning: PruningConfig = PruningConfig()
    distillation: DistillationConfig = DistillationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    accumulate: AccumulateConfig = AccumulateConfig()
    monitor: MonitorConfig = MonitorConfig()
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    memory: MemoryConfig = MemoryConfig()
    distributed: DistributedConfig = DistributedConfig()

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher metric is better; `monitor.better` and `scheduler.mode` never contradict each other."""
        return self.monitor.better != "lower" and self.scheduler.mode != "min"

    @property
    def swa_start(self) -> int:
        """The first step whose weights are part of SWA's mean; 0 where SWA is off or the run's length is unknown."""
        total = self.scheduler.total_steps
        if self.swa.share is None or total is None:
            return 0
        # At least the last step, however small the share.
        return total - max(round(self.swa.share * total), 1) + 1

    def replace(self, **sections: Any) -> Config:
        """A checked copy with some sections (or fields of them, as dicts) changed."""
        raw = self.model_dump(exclude_unset=True)  # what nobody has set stays so
        for name, value in sections.items():
            if isinstance(value, dict):
                value = {**raw.get(name, {}), **value}
            raw[name] = value
        return Config.model_validate(raw)
