"""export on real architectures: random weights, small configurations, every axis dynamic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerline.pipeline.report import Report
from tests.stages.test_export import Project

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="these architectures come from transformers")

BATCH = {0: {"name": "batch", "max": 6}}
BERT_CONFIG = "hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99"
BERT = f"""
from transformers import BertConfig, BertForSequenceClassification
def model(): return BertForSequenceClassification(BertConfig({BERT_CONFIG}))
def example_inputs():
    ids = torch.arange(14).reshape(2, 7) % 99
    return {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
"""
WRAPPED = f"""
from transformers import BertConfig, BertModel
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig({BERT_CONFIG}))
    def forward(self, **batch):
        return self.bert(**batch).pooler_output
def model(): return Pooled()
def example_inputs():
    ids = torch.arange(14).reshape(2, 7) % 99
    return {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
"""
GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
def model():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=40,
                                      bos_token_id=0, eos_token_id=0))
def example_inputs(): return {"input_ids": torch.arange(14).reshape(2, 7) % 99, "use_cache": False}
"""
VIT = """
from transformers import ViTConfig, ViTForImageClassification
def model():
    return ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                               intermediate_size=64, image_size=32, patch_size=8))
def example_inputs(): return (torch.randn(2, 3, 32, 32),)
"""
MOBILENET = """
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
def model(): return MobileNetV2ForImageClassification(MobileNetV2Config(depth_multiplier=0.35, num_labels=7))
def example_inputs(): return (torch.randn(2, 3, 64, 64),)
"""
RESNET = """
from transformers import ResNetConfig, ResNetForImageClassification
def model():
    return ResNetForImageClassification(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128],
                                                     depths=[2, 2, 2, 2], layer_type="basic", num_labels=7))
def example_inputs(): return (torch.randn(1, 3, 64, 64),)
"""
LSTM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True, bidirectional=True, num_layers=2)
        self.head = nn.Linear(32, 3)
    def forward(self, x): return self.head(self.rnn(x)[0])
def model(): return Net()
def example_inputs(): return (torch.randn(2, 5, 8),)
"""
SEQUENCE = {0: {"name": "batch", "max": 6}, 1: {"name": "seq", "max": 40}}
MASKED = {"input_ids": SEQUENCE, "attention_mask": SEQUENCE}
IDS, MASK = {"input_ids": {"low": 0, "high": 98}}, {"attention_mask": {"low": 0, "high": 1}}
STEP = {2: {"name": "h", "multiple": 32, "max": 128}, 3: {"name": "w", "multiple": 32, "max": 128}}


@pytest.mark.parametrize(
    ("source", "config", "module"),
    [
        (BERT, {"dynamic": MASKED, "ranges": IDS | MASK}, "bert.encoder.layer.1.output.dense"),
        (WRAPPED, {"dynamic": MASKED, "ranges": IDS}, "bert.pooler.dense"),
        (GPT2, {"dynamic": {"input_ids": SEQUENCE}, "ranges": IDS}, "transformer.h.1.mlp.c_proj"),
        (VIT, {"dynamic": {"pixel_values": BATCH}}, "vit.layers.1.mlp.fc2"),
        (MOBILENET, {"dynamic": {"pixel_values": BATCH | STEP}}, "mobilenet_v2.layer.14.reduce_1x1.convolution"),
        (RESNET, {"dynamic": {"pixel_values": BATCH}}, "resnet.encoder.stages.3.layers.1.layer.1.convolution"),
        (LSTM, {"dynamic": {"x": SEQUENCE}}, "rnn"),
    ],
    ids=["bert", "wrapped-bert", "gpt2", "vit", "mobilenet", "resnet", "lstm"],
)  # fmt: skip
def test_every_value_is_within_its_floor(tmp_path: Path, source: str, config: dict[str, Any], module: str) -> None:
    report: Report = Project(tmp_path).export(source, **config)
    assert [r.name for r in report.records if not r.passed] == []
    assert [g for g in report.gates if not g.passed] == []
    modules = {r.module for r in report.records}
    assert module in modules
    assert all(r.extra.get("source") for r in report.records if r.module)


_TEXT = "vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, max_position_embeddings=64"
_CAUSAL = f"{_TEXT}, num_hidden_layers=1, num_key_value_heads=1, use_cache=False"
_IDS = "pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2"


@pytest.mark.parametrize("mask", ["torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])", "torch.ones_like(ids).bool()"])
@pytest.mark.parametrize(
    ("config", "model", "options"),
    [
        ("LlamaConfig", "LlamaForCausalLM", _CAUSAL),
        ("MistralConfig", "MistralForCausalLM", f"{_CAUSAL}, sliding_window=4"),
        ("ModernBertConfig", "ModernBertModel", f"{_TEXT}, num_hidden_layers=2, local_attention=4, {_IDS}"),
    ],
)
def test_padded_text_models_pass(tmp_path: Path, config: str, model: str, options: str, mask: str) -> None:
    """Padded on the left, a causal model has rows that see no key at all."""
    source = f"""
from transformers import {config}, {model}
def model(): return {model}({config}({options}))
def example_inputs():
    ids = torch.arange(16).reshape(2, 8) % 32
    return {{"input_ids": ids, "attention_mask": {mask}}}
"""
    text = {0: {"name": "batch", "max": 6}, 1: {"name": "seq", "max": 16}}
    report = Project(tmp_path).export(
        source, dynamic={"input_ids": text, "attention_mask": text}, ranges={"input_ids": {"low": 0, "high": 31}}
    )
    assert report.passed, [g for g in report.gates if not g.passed]
    assert any("attention_mask padded on the right and the left" in g.name for g in report.gates)


def test_padding_that_depends_on_the_size_is_found(tmp_path: Path) -> None:
    """MobileNetV2 pads by what its size leaves over of the stride, in plain Python numbers."""
    report = Project(tmp_path).export(MOBILENET, dynamic={"pixel_values": {2: {"name": "h", "min": 64, "max": 80}}})
    failed = {g.name: g.hint for g in report.gates if not g.passed}
    # What is left over after one stride, after two, and so on: each is asked apart.
    assert failed.keys() == {f"module itself, h={h}" for h in (65, 66, 68, 72, 80)}
    assert all("modeling_mobilenet_v2.py" in hint for hint in failed.values())


def test_a_cache_among_the_outputs_says_how_to_switch_it_off(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="returns a DynamicCache") as error:
        Project(tmp_path).export(GPT2.replace(', "use_cache": False', ""))
    assert "use_cache=False" in str(error.value)
