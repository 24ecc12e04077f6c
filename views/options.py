"""The arguments and options of the command line, in one table, and which of them exclude each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from layerline.pipeline.errors import ConfigError

STAGES = "train, ema, export, fuse, quantize, engine; import-weights or import-onnx where the project starts there"
if "--help" in sys.argv:  # looking through all installed packages takes too long for every command
    _others = sorted(entry.name for entry in metadata.entry_points(group="layerline.stages"))
    STAGES = "; ".join([STAGES, *_others])
DEBUGGED = "export or fuse"
TOP = 20  # values that `pipe diff` shows where nobody says how many

# Of several commands.
Folder = Annotated[Path, Option("--project", "-C", help="The project's folder.", show_default="current folder")]
Sets = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a field of pipe.yaml.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document.")]
StageName = Annotated[str, Argument(metavar="STAGE", help=f"One of {STAGES}.")]
RunId = Annotated[
    str | None,
    Option("--run", metavar="RUN", help="An id from `pipe runs`, `last` or `previous`.", show_default="last"),
]

# pipe init
NewFolder = Annotated[Path, Argument(metavar="DIR", help="Folder of the new project.")]
Template = Annotated[str | None, Option(help="Template: mnist or blank.", show_default="mnist")]
FromOnnx = Annotated[Path | None, Option("--from-onnx", metavar="FILE", help="Start from an ONNX model.")]
FromCheckpoint = Annotated[
    Path | None, Option("--from-checkpoint", metavar="FILE", help="Start from weights; needs --model.")
]
Factory = Annotated[str | None, Option(metavar="MODULE:FACTORY", help="Function that builds the network.")]
Samples = Annotated[Path | None, Option(metavar="NPZ", help="Samples: one array per input, and optionally `label`.")]
Trust = Annotated[bool, Option("--trust", help="Allow the checkpoint to run pickled code.")]

# pipe run, tune and resume
StageNames = Annotated[list[str], Argument(metavar="all | STAGE…", help=f"Stages to run: {STAGES}.")]
Force = Annotated[bool, Option("--force", help="Run the named stages even when they are fresh.")]
MaxDrop = Annotated[
    str | None,
    Option(
        metavar="BUDGET",
        help="As quantize.max_drop: 0.01, 0.5% or {accuracy: 0.5%}.",
        show_default="that of pipe.yaml, else 0.5%",
    ),
]
Prove = Annotated[bool, Option("--prove", help="Show that resuming changes no bit of the result.")]
Steps = Annotated[
    int | None, Option(min=1, help="With --prove: optimizer steps before and after the checkpoint.", show_default="10")
]

# pipe diff
DiffFirst = Annotated[str, Argument(metavar="STAGE[@RUN]|FILE", help=f"One of {STAGES}; or an ONNX file.")]
DiffSecond = Annotated[
    str | None,
    Argument(metavar="[STAGE[@RUN]|FILE]", help="The stage or file whose model is compared with the first's."),
]
DiffData = Annotated[Path | None, Option(metavar="NPZ", help="Samples for two files: one array per input.")]
Against = Annotated[
    str | None, Option(metavar="RUN", help="Compare with another run: an id from `pipe runs`, or `previous`.")
]
On = Annotated[
    str | None, Option(metavar="BACKEND", help="Run the stage's model on a backend and compare with onnxruntime.")
]
Sort = Annotated[
    Literal["own", "error", "sqnr", "effect", "gain", "clipped", "network"] | None,
    Option(
        help="Sort by each layer's own error, by accumulated error (sqnr), by its effect at the outputs, by what "
        "they gain without it, or so on.",
        show_default="own where measured; network with --json",
    ),
]
Top = Annotated[
    int | None, Option(min=1, help="Number of values to show.", show_default=f"{TOP}, or all with --json or --csv")
]
Module = Annotated[
    str | None, Option(metavar="PATTERN", help="Only modules of this path and below it, or that match this glob.")
]
FailUnder = Annotated[
    list[str] | None,
    Option(
        metavar="MEASURE=VALUE",
        help="Exit with code 1 if sqnr, own, effect, weight (dB) or cosine of a layer is lower.",
    ),
]
DiffRepro = Annotated[
    Path | None, Option(metavar="DIR", help="For two models: write the smallest one that shows the first value listed.")
]
ByChannel = Annotated[
    str, Option(metavar="LAYER", help="For two models: show the error of each channel of a layer instead.")
]
AsCsv = Annotated[bool, Option("--csv", help="Print the table as CSV.")]

# pipe why and debug
Try = Annotated[bool, Option("--try", help="Make the advised change on the side and show before and after.")]
WhyRepro = Annotated[
    Path | None, Option(metavar="DIR", help="Write the smallest model that shows the likeliest cause.")
]
Debugged = Annotated[str, Argument(metavar="STAGE", help=f"{DEBUGGED}.")]
DebugFolder = Annotated[
    Path | None, Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default="debug-STAGE")
]

# pipe report and plan
Page = Annotated[Path, Option("--output", "-o", help="File to write.")]
Compare = Annotated[
    list[str] | None,
    Option(metavar="RUN", help="Put this run beside it; may be repeated.", show_default="the run before"),
]
Serve = Annotated[bool, Option("--serve", help="Show the run that is going on, on 127.0.0.1.")]
Port = Annotated[int | None, Option(min=1, max=65535, help="With --serve: the port.", show_default="a free one")]
Planned = Annotated[str, Argument(metavar="[STAGE|FILE]", help="quantize, or a plan.json or a folder that holds one.")]
PlanDiff = Annotated[
    str | None,
    Option("--diff", metavar="OTHER", help="Show what differs from a run (`previous`, an id) or a plan.json."),
]

# pipe gc
Keep = Annotated[int, Option(min=0, help="Number of newest runs to keep complete.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only list what would be removed.")]
Verbose = Annotated[bool, Option("--verbose", help="List each removed file.")]

DiffKind = Literal["one stage", "two stages", "two files"]
_TWO_MODELS = "needs two models: name a second stage or file, as in pipe diff fuse quantize"
_ONE_STAGE = "is about one stage"
_STAGE = "is about a stage, and these are two files"
# Options that mean nothing for a kind of comparison, with the reason.
_UNFIT: Mapping[DiffKind, Mapping[str, str]] = {
    "one stage": dict.fromkeys(("data", "repro", "by-channel"), _TWO_MODELS),
    "two stages": {
        **dict.fromkeys(("against", "on"), _ONE_STAGE),
        "data": "is about two ONNX files: stages are compared on their probes",
    },
    "two files": {**dict.fromkeys(("against", "on"), _ONE_STAGE), **dict.fromkeys(("run", "set"), _STAGE)},
}
_EXCLUSIVE = (("csv", "json"), ("on", "against"), ("csv", "by-channel"), ("repro", "module"))


def diff_kind(first: str, second: str | None, options: Mapping[str, object]) -> DiffKind:
    """What `pipe diff` compares. Raises ConfigError on options, by name, that do not fit it or each other."""
    kind: DiffKind = "two stages"
    if first.endswith(".onnx") or str(second).endswith(".onnx"):
        kind = "two files"
    elif second is None:
        kind = "one stage"
    for name, reason in _UNFIT[kind].items():
        refuse({name: options[name]}, reason)
    for pair in _EXCLUSIVE:
        if all(options[name] for name in pair):
            used = " and ".join(f"--{name}" for name in pair)
            raise ConfigError(f"{used} exclude each other", hint="give one of the two")
    return kind


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuses options, by name, that mean nothing here; those that are not used pass."""
    for name, value in options.items():
        if value:
            raise ConfigError(
                f"it {reason}", where=f"--{name}", hint="leave it out; a command lists its options with --help"
            )
