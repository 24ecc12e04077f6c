"""Language models: an LSTM with SGD by hand, minGPT, nanoGPT, and fine-tuning of a classifier on sentences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer
from tests.loops import Losses, agree

VOCABULARY, LENGTH = 12, 8


def text(count: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences in which each token follows from the one before: batches of (tokens, next tokens)."""
    start = torch.randint(0, VOCABULARY, (count, 4, 1))
    tokens = (start + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The word language model: SGD written out, hidden states carried over, a quarter of the rate where validation stalls.

RATE, CLIP = 5.0, 0.25


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, hidden = self.lstm(self.embed(tokens), hidden)
        return self.head(out), hidden


def rest() -> tuple[Tensor, ...]:
    return torch.zeros(1, 4, 16), torch.zeros(1, 4, 16)


@torch.no_grad()
def held_out(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    # The second validation is made worse than the first, so that the rate falls.
    return sum(token_loss(model(x, rest())[0], y).item() for x, y in data) / len(data)


def plain_words() -> Losses:
    model, data = Recurrent(), text(10)
    held = [text(2), [(x, x) for x, _ in text(2)], text(2)]
    rate, best = RATE, math.inf
    losses = []
    for validation in held:
        hidden = rest()
        for x, y in data:
            model.zero_grad()
            hidden = tuple(h.detach() for h in hidden)
            logits, hidden = model(x, hidden)
            loss = token_loss(logits, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-rate)
            losses.append(loss.item())
        value = held_out(model, validation)
        if value < best:
            best = value
        else:
            rate /= 4.0
    assert rate < RATE
    return losses


def adopted_words() -> Losses:
    model, data = Recurrent(), text(10)
    held = [text(2), [(x, x) for x, _ in text(2)], text(2)]
    schedule = {"name": "plateau", "factor": 0.25, "patience": 0, "threshold": 0, "mode": "min"}
    sgd = {"name": "sgd", "lr": RATE, "momentum": 0}
    mo = ModelOptimizer(model, optimizer=sgd, scheduler=schedule, clip={"max_norm": CLIP})
    losses = []
    for validation in held:
        hidden = rest()
        for x, y in data:
            hidden = tuple(h.detach() for h in hidden)
            logits, hidden = model(x, hidden)
            losses.append(float(mo.step(token_loss(logits, y))))
        mo.validate(lambda net, data=validation: held_out(net, data))
    assert mo.current_lr < RATE
    return losses


def test_word_language_model() -> None:
    agree(plain_words, adopted_words, exact=False)


# minGPT and nanoGPT: a small transformer.


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def plain_mingpt() -> Losses:
    """Weights of linear layers decay; biases, norms and embeddings don't."""
    model, data = Gpt(), text(24)
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in linear], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in linear], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for x, y in data:
        loss = token_loss(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adopted_mingpt() -> Losses:
    model, data = Gpt(), text(24)
    config = {
        "optimizer": {"name": "adamw", "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1,
                      "no_decay": ["embeddings"]},
        "clip": {"max_norm": 1.0},
    }  # fmt: skip
    mo = ModelOptimizer(model, config)
    return [float(mo.step(token_loss(model(x), y))) for x, y in data]


def test_mingpt() -> None:
    agree(plain_mingpt, adopted_mingpt, exact=False)


# nanoGPT: micro-batches, a loss scaler, the rate worked out by a function at each step.

MICRO, WARMUP, TOTAL, PEAK, LOWEST = 3, 3, 12, 3e-3, 3e-4


def rate_at(step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    part = (step - WARMUP) / (TOTAL - WARMUP)
    return LOWEST + 0.5 * (1 + math.cos(math.pi * part)) * (PEAK - LOWEST)


def plain_nanogpt() -> Losses:
    model, data = Gpt(), text(MICRO * TOTAL)
    weights = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(TOTAL):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        for x, y in data[MICRO * step : MICRO * (step + 1)]:
            loss = token_loss(model(x), y) / MICRO
            scaler.scale(loss).backward()
            losses.append(loss.item() * MICRO)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return losses


def adopted_nanogpt() -> Losses:
    model, data = Gpt(), text(MICRO * TOTAL)
    config = {
        "optimizer": {"name": "adamw", "lr": PEAK, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "warmup_start": 1 / (WARMUP + 1), "min_lr": LOWEST,
                      "total_steps": TOTAL},
        "clip": {"max_norm": 1.0},
        "accumulate": {"steps": MICRO},
    }  # fmt: skip
    mo = ModelOptimizer(model, config)
    losses = [float(mo.step(token_loss(model(x), y))) for x, y in data]
    assert mo.global_step == TOTAL
    return losses


def test_nanogpt() -> None:
    agree(plain_nanogpt, adopted_nanogpt, exact=False)


# Fine-tuning as on GLUE: a pretrained encoder, no decay of biases and norms, a linear schedule with warm-up from 0.


def sentences() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16, num_labels=2)  # fmt: skip
    tokens = torch.randint(2, 20, (12, 6, 8))
    labels = torch.randint(0, 2, (12, 6))
    tokens[:, :, 0] = labels
    mask = torch.ones_like(tokens)
    data = [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(tokens, mask, labels, strict=True)]
    return BertForSequenceClassification(config).train(), data


def plain_glue() -> Losses:
    from transformers import get_linear_schedule_with_warmup

    model, data = sentences()
    spared = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(spared)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(spared)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=24)
    losses = []
    for _ in range(2):
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def adopted_glue() -> Losses:
    model, data = sentences()
    config = {
        "optimizer": {"name": "adamw", "lr": 5e-3, "weight_decay": 0.01},
        "scheduler": {"name": "linear", "warmup_steps": 4, "warmup_start": 0, "total_steps": 24},
        "clip": {"max_norm": 1.0},
    }
    mo = ModelOptimizer(model, config)
    return [float(mo.step(model(**batch).loss)) for _ in range(2) for batch in data]


def test_glue() -> None:
    agree(plain_glue, adopted_glue, exact=False)
