"""The trial before a training builds an optimizer too; what it warns of is said once."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from layerline.training.config.sections import Config
from layerline.training.run.hook_trial import _quietly_built


def test_a_trial_keeps_its_warnings_and_logs_none(caplog: pytest.LogCaptureFixture) -> None:
    config = Config().replace(distributed={"overlap": True})
    with caplog.at_level(logging.WARNING, "layerline.training"):
        mo = _quietly_built(nn.Linear(2, 1), config)
    assert [text.split(":")[0] for text in mo.warnings] == ["distributed.overlap changes nothing"]
    assert not caplog.records and not logging.getLogger("layerline.training").disabled
