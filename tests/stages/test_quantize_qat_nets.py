"""Mode qat from training to the quantised ONNX: MNIST, a depthwise net with BatchNorm, and a small transformer."""

import json
import re

import pytest

from layerline import cli

DEPTHWISE = '''
import numpy as np
import torch
from torch import nn

def data(count, seed):
    """The quadrant of the brighter part is the class."""
    drawn = np.random.default_rng(seed)
    y = drawn.integers(0, 4, count)
    x = drawn.standard_normal((count, 3, 16, 16)).astype(np.float32)
    for image, quadrant in zip(x, y):
        top, left = 8 * (quadrant // 2), 8 * (quadrant % 2)
        image[:, top : top + 8, left : left + 8] += 0.3
    return x, y

def train_data(): return data(1024, 0)
def eval_data(): return data(512, 1)

def block(ins, outs):
    return nn.Sequential(nn.Conv2d(ins, ins, 3, padding=1, groups=ins, bias=False), nn.BatchNorm2d(ins), nn.SiLU(),
                         nn.Conv2d(ins, outs, 1, bias=False), nn.BatchNorm2d(outs), nn.Hardswish())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.first, self.second = block(16, 24), block(24, 24)
        self.head = nn.Linear(24 * 16, 4)
    def forward(self, image):
        x = self.first(self.stem(image))
        x = x + self.second(x)
        return {"logits": self.head(nn.functional.avg_pool2d(x, 2).flatten(1)), "features": x.mean((2, 3))}

def model(): return Net()
def loss(net, batch): return nn.functional.cross_entropy(net(batch[0])["logits"], batch[1])
def metric(outputs, y): return {"accuracy": float((outputs[0].argmax(1) == y).mean())}
'''
TRANSFORMER = '''
import numpy as np
import torch
from torch import nn

def data(count, seed):
    """Whether there are more 3 than 7 among the tokens."""
    drawn = np.random.default_rng(seed)
    ids, mask = drawn.integers(1, 12, (count, 12)), np.ones((count, 12), np.int64)
    for row, length in enumerate(drawn.integers(6, 13, count)):
        ids[row, length:], mask[row, length:] = 0, 0
    return {"ids": ids, "mask": mask, "label": ((ids == 3).sum(1) > (ids == 7).sum(1)).astype(np.int64)}

def train_data(): return data(2048, 0)
def eval_data(): return data(512, 1)

class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
    def forward(self, x, mask):
        n, t, width = x.shape
        y = self.before(x)
        q, k, v = (f(y).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :] > 0)
        x = x + self.o(z.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.between(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(12, 32), nn.Parameter(torch.randn(12, 32) * 0.02)
        self.blocks, self.norm, self.head = nn.ModuleList([Block(), Block()]), nn.LayerNorm(32), nn.Linear(32, 2)
    def forward(self, ids, mask):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        weight = mask[..., None].to(x.dtype)
        return self.head((self.norm(x) * weight).sum(1) / weight.sum(1))

def model(): return Net()
'''
LENGTH = "{0: batch, 1: {name: t, min: 2, max: 12}}"
POOR = "calibrator: percentile, percentile: 70, min_db: -99"


@pytest.fixture
def pipe(tmp_path, capfd):
    def run(*arguments):
        code = cli.app([*arguments, "-C", str(tmp_path / "p")], prog_name="pipe", standalone_mode=False)
        return code or 0, capfd.readouterr().out

    return run


def project(folder, task, settings):
    folder.mkdir()
    (folder / "task.py").write_text(task)
    (folder / "pipe.yaml").write_text(f"name: p\ntask: task.py\n{settings}")


def side_by_side(pipe, *arguments):
    """The rows of the table, by figure, and the report."""
    code, said = pipe("run", "quantize", *arguments)
    assert code == 0, said
    _, said = pipe("diff", "quantize", "--json", *arguments)
    report = json.loads(said)["report"]
    assert {gate["name"]: gate["passed"] for gate in report["gates"]}["quantised as trained"]
    return {row["figure"]: row for row in report["tables"]["float, PTQ, QAT"]}, report


@pytest.mark.slow
def test_mnist_gains_back_what_a_poor_range_lost(tmp_path, pipe):
    cli.app(["init", str(tmp_path / "p"), "--template", "mnist"], prog_name="pipe", standalone_mode=False)
    sets = {"train.steps": 150, "quantize.mode": "qat", "quantize.calibrator": "percentile", "quantize.percentile": 70,
            "quantize.max_drop": 0.05, "quantize.qat": "{epochs: 3, lr: 1.0e-3, scale_lr: 0.05}"}  # fmt: skip
    arguments = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    rows, report = side_by_side(pipe, *arguments)
    accuracy = rows["accuracy"]
    assert accuracy["PTQ"] < 0.8 * accuracy["float"] and accuracy["QAT"] > accuracy["float"] - 0.05
    # One identity per tensor: modules and values are those of the stages before.
    assert "block1.conv1, block1.bn1" in {record["module"] for record in report["records"]}
    for command in (("plan", "quantize"), ("why",)):
        code, said = pipe(*command)
        assert code == 0 and said
    code, said = pipe("run", "quantize", *arguments)
    assert code == 0 and re.search(r"quantize +cached", said)


@pytest.mark.slow
def test_a_depthwise_net_with_batch_norm_and_a_dict_of_outputs(tmp_path, pipe):
    settings = f"""
train: {{epochs: 3, optimizer: {{lr: 3.0e-3}}}}
export: {{dynamic: {{image: {{0: batch}}}}}}
quantize: {{mode: qat, {POOR}, qat: {{epochs: 3, lr: 1.0e-3, scale_lr: 0.05}}}}
"""
    project(tmp_path / "p", DEPTHWISE, settings)
    rows, _ = side_by_side(pipe)
    assert rows["accuracy"]["QAT"] > rows["accuracy"]["PTQ"] - 0.01
    assert rows["accuracy"]["QAT"] > rows["accuracy"]["float"] - 0.03
    assert rows["SQNR of logits, dB"]["QAT"] > rows["SQNR of logits, dB"]["PTQ"]


@pytest.mark.slow
def test_a_transformer_with_attention_learns_from_the_float_model(tmp_path, pipe):
    settings = f"""
train: {{epochs: 6, optimizer: {{lr: 3.0e-3}}}}
export: {{dynamic: {{ids: {LENGTH}, mask: {LENGTH}}}, ranges: {{ids: {{low: 0, high: 11}}}}}}
quantize: {{mode: qat, attention: true, {POOR}, qat: {{epochs: 2, lr: 3.0e-4, scale_lr: 0.05, distill: 0.9}}}}
"""
    project(tmp_path / "p", TRANSFORMER, settings)
    rows, _ = side_by_side(pipe)
    assert rows["SQNR of output, dB"]["QAT"] > rows["SQNR of output, dB"]["PTQ"] + 6
    assert rows["accuracy"]["QAT"] > rows["accuracy"]["float"] - 0.02
