"""Every optimizer class of torch and of pytorch-optimizer: how it is made, and how its run is gone on with."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import pytorch_optimizer
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer

BEFORE, AFTER = 10, 5
Make = Callable[[nn.Module], torch.optim.Optimizer]

# What cannot take ten steps in a loop that calls backward() and step(), and why.
EXCEPTIONS = {
    "torch.SparseAdam": "sparse gradients", "adahessian": "second derivatives", "demo": "needs einops",
    "adalomo": "steps inside the backward pass", "distributedmuon": "needs a process group",
    "lomo": "steps inside the backward pass", "sophiah": "second derivatives",
}  # fmt: skip
CLOSURES = ("torch.LBFGS", "alig", "bsam", "lbfgs")
_MUON = ("muon", "muonclip", "adago", "adamuon", "distributedmuon", "normuon")
_CONTIGUOUS = ("torch.LBFGS", "adamp", "adamuon", "lbfgs", "nero", "sgdp", "swats")  # they call view() on weights
_MATRICES = ("torch.Muon", "spectralsphere")  # they take 2-D weights only
_ARGUMENTS = {"bsam": {"num_data": 64}, "ranger21": {"num_iterations": 100}}


class Net(nn.Module):
    """A weight in each order of memory: channels_last, a transposed view, contiguous."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.turned = nn.Linear(4, 6)
        self.last = nn.Linear(6, 2)
        if not contiguous:
            self.conv.to(memory_format=torch.channels_last)
            self.turned.weight = nn.Parameter(torch.randn(4, 6).mul(0.3).t())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x)).mean((2, 3))
        out: Tensor = self.last(torch.tanh(self.turned(hidden)))
        return out


class Matrices(nn.Module):
    """Two weights, one a transposed view, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Linear(75, 6, bias=False)
        self.turned.weight = nn.Parameter(torch.randn(75, 6).mul(0.1).t())
        self.last = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.turned(x.flatten(1))))
        return out


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Matrices() if name in _MATRICES else Net(contiguous=name in _CONTIGUOUS)


def classes() -> dict[str, Make]:
    """What makes each optimizer over a model, by name: `torch.Adam`, `adamp`."""
    own = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and c is not torch.optim.Optimizer}
    out: dict[str, Make] = {f"torch.{n}": lambda model, c=c: c(model.parameters()) for n, c in own.items()}
    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        out[name] = lambda model, name=name: _theirs(name, model)
    return out


def _theirs(name: str, model: nn.Module) -> torch.optim.Optimizer:
    make = pytorch_optimizer.load_optimizer(name)
    if name in _MUON:
        params = list(model.parameters())
        groups = [{"params": [p for p in params if (p.ndim > 1) is wide], "use_muon": wide} for wide in (True, False)]
        return make(groups)
    if name == "adammini":
        return make(model)
    return make(model.parameters(), **_ARGUMENTS.get(name, {}))


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)  # for those that draw in step()
    x = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def by_hand(name: str, make: Make, path: Path) -> bool:
    """Whether torch.save and torch.load go on with equal weights."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss = loss_of(model, step)
                    loss.backward()
                return loss

            closure()
            optimizer.step(*([closure] if name in CLOSURES else []))

    model = net(name)
    optimizer = make(model)
    steps(model, optimizer, 0, BEFORE)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    steps(model, optimizer, BEFORE, BEFORE + AFTER)
    again = net(name)
    other = make(again)
    state = torch.load(path, weights_only=False)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    steps(again, other, BEFORE, BEFORE + AFTER)
    return equal(model, again)


def by_checkpoint(name: str, make: Make, path: Path) -> tuple[bool, bool]:
    """Whether a checkpoint in a fresh run, and a copy of the object, go on with equal weights."""

    def build() -> ModelOptimizer:
        model = net(name)
        return ModelOptimizer(model, {}, optimizer=make(model))

    def steps(mo: ModelOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            if name in CLOSURES:
                mo.step(closure=lambda step=step: loss_of(mo.model, step))
            else:
                mo.step(loss_of(mo.model, step))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mo = build()
        steps(mo, 0, BEFORE)
        mo.save_ckpt(path)
        again, twin = build(), copy.deepcopy(mo)
        again.load_ckpt(path)
        path.unlink()
        for each in (mo, again, twin):
            steps(each, BEFORE, BEFORE + AFTER)
    return equal(mo.model, again.model), equal(mo.model, twin.model)


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit; NaN equals NaN."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.detach().contiguous().view(torch.int32), b.detach().contiguous().view(torch.int32))
               for a, b in pairs)  # fmt: skip
