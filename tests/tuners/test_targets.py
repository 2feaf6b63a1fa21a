"""Where methods act: targets by convention, and the head beside the backbone."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from dppeft._kind import kind_of
from dppeft.tuners import targets

# Architectures whose heads and projections have names of their own; on the meta device, no weights.
ARCHITECTURES = {
    "bart": (["classification_head"], ["q_proj", "v_proj"]),
    "bloom": (["score"], ["query_key_value"]),
    "camembert": (["classifier"], ["query", "value"]),
    "deberta": (["pooler", "classifier"], ["in_proj"]),
    "deberta-v2": (["pooler", "classifier"], ["query_proj", "value_proj"]),
    "distilbert": (["pre_classifier", "classifier"], ["q_lin", "v_lin"]),
    "gpt_neox": (["score"], ["query_key_value"]),
    "modernbert": (["head", "classifier"], ["Wqkv"]),
    "mpnet": (["classifier"], ["q", "v"]),
    "opt": (["score"], ["q_proj", "v_proj"]),
    "phi3": (["score"], ["qkv_proj"]),
    "qwen3": (["score"], ["q_proj", "v_proj"]),
    "t5": (["classification_head"], ["q", "v"]),
    "xlm": (["sequence_summary"], ["q_lin", "v_lin"]),
    "xlnet": (["sequence_summary", "logits_proj"], None),
}
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_and_default_targets_by_architecture(architecture: str) -> None:
    config = transformers.AutoConfig.for_model(architecture)
    for field in _DEPTH:
        if hasattr(config, field):
            setattr(config, field, 1)
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    head, expected = ARCHITECTURES[architecture]
    assert kind_of(model) == "classification"
    assert targets.find_head(model, "classification") == head
    assert targets.default_targets(model, {}) == expected


def test_the_tuners_own_table_comes_first_where_it_fits() -> None:
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1))
    assert targets.default_targets(model, {"bert": ["key"]}) == ["key"]
    assert targets.default_targets(model, {"bert": ["c_attn"]}) == ["query", "value"]
    assert targets.default_targets(model, {"bert": r".*\.dense"}) == r".*\.dense"
    assert targets.default_targets(model, {}, norms=True) == ["LayerNorm"]
    assert targets.find_head(model, kind_of(model)) == []  # a backbone has no head


def test_all_linear_needs_a_regular_expression_where_last_words_are_not_enough() -> None:
    body = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"0": nn.ReLU()})])
    assert targets.all_linear(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), []) == {"0"}
    assert targets.all_linear(body, []) == "0"  # as a set it would match "1.0" as well
    assert targets.missing_targets(body, ["0", "1.0", "2"]) == ["2"]
