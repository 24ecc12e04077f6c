"""Models that generate data: a DCGAN, a variational autoencoder and a WGAN with gradient penalty."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer
from tests.loops import Losses, agree, images

# DCGAN: two models; the discriminator sums the gradients of a real and of a generated batch.

NOISE, STEPS = 6, 8
criterion = nn.BCEWithLogitsLoss()


def gan() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    up = [nn.ConvTranspose2d(NOISE, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    g = nn.Sequential(*up, nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
    d = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten(0))
    return g, d, list(images(8 * STEPS, 8)[0].split(8))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))


def plain_dcgan() -> Losses:
    g, d, data = gan()
    optimizer_g, optimizer_d = adam(g), adam(d)
    losses = []
    for real in data:
        d.zero_grad()
        loss_real = criterion(d(real), torch.ones(len(real)))
        loss_real.backward()
        fake = g(torch.randn(len(real), NOISE, 1, 1))
        loss_fake = criterion(d(fake.detach()), torch.zeros(len(real)))
        loss_fake.backward()
        optimizer_d.step()
        g.zero_grad()
        loss_g = criterion(d(fake), torch.ones(len(real)))
        loss_g.backward()
        optimizer_g.step()
        losses += [loss_real.item(), loss_fake.item(), loss_g.item()]
    return losses


def adopted_dcgan() -> Losses:
    g, d, data = gan()
    mo = ModelOptimizer({"g": g, "d": d}, optimizer={"g": adam(g), "d": adam(d)})
    losses = []
    for real in data:
        loss_real = criterion(d(real), torch.ones(len(real)))
        mo.backward(loss_real, only="d")
        fake = g(torch.randn(len(real), NOISE, 1, 1))
        loss_fake = criterion(d(fake.detach()), torch.zeros(len(real)))
        mo.backward(loss_fake, only="d")
        mo.step(only="d")
        loss_g = criterion(d(fake), torch.ones(len(real)))
        mo.step(loss_g, only="g")
        losses += [loss_real.item(), loss_fake.item(), loss_g.item()]
    return losses


def test_dcgan() -> None:
    agree(plain_dcgan, adopted_dcgan, exact=True, falls=False)


# A variational autoencoder: the loss is a sum over the batch, and an epoch's log line divides by the samples.


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.log_var = nn.Linear(64, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.out = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.hidden(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return self.out(z), mean, log_var


def vae_loss(out: Tensor, x: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    reconstruction = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return reconstruction + divergence


def pixels() -> list[Tensor]:
    return list(images(96, 8)[0].flatten(1).clamp(0, 1).split(8))


def plain_vae() -> Losses:
    model, data = Autoencoder(), pixels()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = vae_loss(*insert(model(x), x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / len(x))
    return losses


def adopted_vae() -> Losses:
    model, data = Autoencoder(), pixels()
    mo = ModelOptimizer(model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for x in data:
        loss = vae_loss(*insert(model(x), x))
        losses.append(mo.step(loss) / len(x))
    return losses


def weighted_vae() -> Losses:
    """The sum divided by its samples: the log is per sample, and short batches may be accumulated."""
    model, data = Autoencoder(), pixels()
    mo = ModelOptimizer(model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    return [float(mo.step(vae_loss(*insert(model(x), x)), weight=len(x))) for x in data]


def insert(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, mean, log_var = outputs
    return out, x, mean, log_var


def test_vae() -> None:
    agree(plain_vae, adopted_vae, exact=True)


def test_vae_with_weights() -> None:
    """Adam's update doesn't change with the size of the gradient but for eps."""
    agree(plain_vae, weighted_vae, exact=False)


# WGAN with gradient penalty: the critic's loss holds a gradient, so its backward pass goes through a second derivative.


def critics() -> tuple[nn.Module, nn.Module]:
    g = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return g, nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def critic_loss(d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
    penalty: Tensor = (slope.norm(2, dim=1) - 1).square().mean()
    loss: Tensor = d(fake).mean() - d(real).mean() + 10 * penalty
    return loss


def plain_wgan() -> Losses:
    g, d = critics()
    optimizer_g, optimizer_d = adam(g), adam(d)
    losses = []
    for step in range(STEPS):
        loss = critic_loss(d, torch.randn(6, 4) + 2, g(torch.randn(6, 3)).detach())
        optimizer_d.zero_grad()
        loss.backward()
        optimizer_d.step()
        losses.append(loss.item())
        if step % 3 == 2:
            optimizer_g.zero_grad()
            loss = -d(g(torch.randn(6, 3))).mean()
            loss.backward()
            optimizer_g.step()
            losses.append(loss.item())
    return losses


def adopted_wgan(file: Path) -> Losses:
    """Is saved in the middle, and continues in new objects."""
    g, d = critics()
    mo = ModelOptimizer({"g": g, "d": d}, optimizer={"g": adam(g), "d": adam(d)})
    losses: Losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            mo.save_ckpt(file)
            g, d = critics()
            mo = ModelOptimizer({"g": g, "d": d}, optimizer={"g": adam(g), "d": adam(d)})
            mo.load_ckpt(file)
        loss = critic_loss(d, torch.randn(6, 4) + 2, g(torch.randn(6, 3)).detach())
        losses.append(mo.step(loss, only="d"))
        if step % 3 == 2:
            losses.append(mo.step(-d(g(torch.randn(6, 3))).mean(), only="g"))
    return losses


def test_wgan_with_gradient_penalty(tmp_path: Path) -> None:
    agree(plain_wgan, lambda: adopted_wgan(tmp_path / "wgan.safetensors"), exact=True, falls=False)
