"""Image classifiers: MNIST, ImageNet, timm, and two CIFAR loops."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from layerline import ModelOptimizer
from tests.loops import Losses, agree, batches, images

EPOCHS = 3


class Block(nn.Module):
    """A residual block with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + x)


def resnet(width: int = 8) -> nn.Module:
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)]
    return nn.Sequential(*stem, Block(width), Block(width), *head)


def color() -> list[tuple[Tensor, Tensor]]:
    return batches(*images(48, 8, channels=3), 12)


# MNIST: Adadelta, dropout, a scheduler of torch's that steps once an epoch.


def mnist() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    conv = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()]
    return nn.Sequential(*conv, nn.Linear(36, 4), nn.LogSoftmax(1)), batches(*images(48, 8), 12)


def plain_mnist() -> Losses:
    model, data = mnist()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses


def adopted_mnist() -> Losses:
    model, data = mnist()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    mo = ModelOptimizer(model, optimizer=optimizer)
    mo.register("scheduler", scheduler)
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.nll_loss(model(x), y)
            losses.append(float(mo.step(loss)))
        scheduler.step()
    assert mo.warnings == []
    return losses


def test_mnist() -> None:
    agree(plain_mnist, adopted_mnist, exact=True)


# ImageNet: SGD with momentum, decay on every parameter, the rate cut after some epochs.


def plain_imagenet() -> Losses:
    model, data = resnet(), color()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses


def adopted_imagenet() -> Losses:
    model, data = resnet(), color()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    # Schedules of the configuration count optimizer steps, not epochs.
    schedule = {"name": "step", "step_size": 2 * len(data), "gamma": 0.1}
    mo = ModelOptimizer(model, optimizer=optimizer, scheduler=schedule)
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            losses.append(float(mo.step(loss)))
    return losses


def test_imagenet() -> None:
    agree(plain_imagenet, adopted_imagenet, exact=True)


# timm: AdamW without decay of biases and norms, warm-up from 0, cosine, an averaged copy of the model.

DECAY, WARMUP = 0.9, 3


def plain_timm() -> tuple[Losses, dict[str, Tensor]]:
    model, data = resnet(), color()
    average = copy.deepcopy(model).eval()
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, fused=True)
    total = EPOCHS * len(data)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / WARMUP)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - WARMUP, eta_min=2e-5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [WARMUP])
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            for kept, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                if kept.is_floating_point():
                    kept.copy_(DECAY * kept + (1 - DECAY) * value)
            losses.append(loss.item())
    return losses, average.state_dict()


def adopted_timm() -> tuple[Losses, dict[str, Tensor]]:
    model, data = resnet(), color()
    config = {
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.05},
        "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "warmup_start": 0, "min_lr": 2e-5,
                      "total_steps": EPOCHS * len(data)},
        "ema": {"decay": DECAY},
    }  # fmt: skip
    mo = ModelOptimizer(model, config)
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            losses.append(float(mo.step(loss)))
    return losses, mo.export()


def test_timm() -> None:
    agree(lambda: plain_timm()[0], lambda: adopted_timm()[0], exact=False)
    torch.manual_seed(7)
    _, average = plain_timm()
    torch.manual_seed(7)
    _, exported = adopted_timm()
    for name, value in exported.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, average[name], rtol=1e-4, atol=1e-5)


# CIFAR with one_cycle: L2 on every parameter, gradients clipped by value, the rate set at each step.


def plain_one_cycle() -> Losses:
    model, data = resnet(), color()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs=EPOCHS, steps_per_epoch=len(data))
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    return losses


def adopted_one_cycle() -> Losses:
    model, data = resnet(), color()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-4)
    schedule = {"name": "one_cycle", "total_steps": EPOCHS * len(data)}
    mo = ModelOptimizer(model, optimizer=optimizer, scheduler=schedule, clip={"value": 0.1})
    losses = []
    for _ in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            losses.append(float(mo.step(loss)))
    return losses


def test_cifar_one_cycle() -> None:
    agree(plain_one_cycle, adopted_one_cycle, exact=False)


# CIFAR with stochastic weight averaging: an equal mean of the weights after each late epoch, statistics taken anew.


def plain_swa() -> Losses:
    model, data = resnet(), color()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    losses = []
    for epoch in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch > 0:
            average.update_parameters(model)
            swa_scheduler.step()
    update_bn(data, average)
    average.eval()
    return [*losses, F.cross_entropy(average(data[0][0]), data[0][1]).item()]


def adopted_swa() -> Losses:
    model, data = resnet(), color()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    mo = ModelOptimizer(model, optimizer=optimizer)
    mo.register("swa", average)  # checkpoints hold the average and its count
    mo.register("swa_scheduler", swa_scheduler)
    losses = []
    for epoch in range(EPOCHS):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            losses.append(float(mo.step(loss)))
        if epoch > 0:
            average.update_parameters(model)
            swa_scheduler.step()
    update_bn(data, average)
    average.eval()
    return [*losses, F.cross_entropy(average(data[0][0]), data[0][1]).item()]


def test_cifar_swa() -> None:
    agree(plain_swa, adopted_swa, exact=True)
