"""What the loss of a teacher without classes is."""

import pytest
import torch
from torch import nn

from layerline.pipeline.errors import TaskError
from layerline.qat.student import OutputMatching


class Answers(nn.Module):
    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return {"results": list(self.outputs), "name": "net"}


def test_each_output_counts_by_its_own_variance():
    # Variances of 1 and 10,000; the student is off by 1 and by 100, and by half of that.
    boxes, scores = torch.tensor([-1.0, 1.0]), torch.tensor([-100.0, 100.0])
    teacher = Answers(boxes, scores, torch.tensor([3, 4]))
    matching = OutputMatching(teacher, weight=0.75)
    loss = torch.tensor(8.0)
    same = matching.mixed(teacher(None), loss, (None,), {})
    assert float(same) == pytest.approx(0.25 * 8)
    other = Answers(boxes + 1, scores + 50, torch.tensor([0, 0]))
    mixed = matching.mixed(other(None), loss, (None,), {})
    assert float(mixed) == pytest.approx(0.25 * 8 + 0.75 * (1 + 0.25) / 2, rel=1e-5)


def test_what_the_teacher_leaves_out_counts_nothing():
    teacher = Answers(torch.tensor([float("-inf"), 1.0, -1.0]))
    student = torch.tensor([5.0, 1.0, 1.0], requires_grad=True)
    mixed = OutputMatching(teacher, weight=1.0).mixed(
        {"results": [student], "name": "net"}, torch.tensor(0.0), (None,), {}
    )
    mixed.backward()
    assert float(mixed.detach()) == pytest.approx(2.0, rel=1e-5) and student.grad[0] == 0
    with pytest.raises(TaskError, match="no float output"):
        OutputMatching(Answers(torch.tensor([1])), weight=1.0).mixed(
            Answers(torch.tensor([1]))(None), mixed, (None,), {}
        )
