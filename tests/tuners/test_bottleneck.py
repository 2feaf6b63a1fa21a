"""Bottleneck adapters: the function, where they sit, how many parameters, and their way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dppeft
from dppeft.tuners.bottleneck import BottleneckLayer
from tests import architectures, tiny

D = tiny.WIDTH


def layers_of(model: nn.Module) -> dict[str, BottleneckLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, BottleneckLayer)}


def test_starts_as_the_model_it_was_to_the_bit() -> None:
    batch = tiny.make_batch("bert")
    base = tiny.build("bert")
    before = base(**batch).logits
    wrapped = dppeft.wrap(tiny.build("bert"), "adapter")
    assert torch.equal(before, wrapped(**batch).logits)


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_explicit_formula(activation: str, bias: bool) -> None:
    options = {"bottleneck": 5, "activation": activation, "bias": bias}
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "adapter", **options))
    layer = next(iter(layers_of(model).values()))
    x = torch.randn(3, 7, D)
    own = layer.bottleneck_networks["default"]
    h = x @ layer.base_layer.weight.T + layer.base_layer.bias
    inner = h @ own.down.weight.T + (own.down.bias if bias else 0)
    f = {"gelu": nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh}[activation]
    expected = h + f(inner) @ own.up.weight.T + (own.up.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected)
    assert (own.down.bias is not None) == bias


@pytest.mark.parametrize(("bottleneck", "expected"), [(16, 0.59e6), (48, 1.77e6)])
def test_parameters_of_roberta_base_are_the_papers(bottleneck: int, expected: float) -> None:
    """Yu et al. 2022: two adapters in each of 12 layers, two matrices of 768 x k, no biases."""
    from transformers import AutoModelForSequenceClassification, RobertaConfig

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(RobertaConfig(vocab_size=50))
        wrapped = dppeft.wrap(model, "adapter", bottleneck=bottleneck)
    own = sum(p.numel() for n, p in wrapped.named_parameters() if "bottleneck_networks" in n)
    assert own == 12 * 2 * 2 * 768 * bottleneck
    assert own == pytest.approx(expected, rel=0.01)


PLACES = {  # architecture -> (Houlsby, Pfeiffer) adapters in the tiny model's two blocks
    "bert": (4, 2),
    "roberta": (4, 2),
    "distilbert": (4, 2),
    "electra": (4, 2),
    "albert": (2, 1),  # one shared block
    "deberta": (4, 2),
    "gpt2": (4, 2),
    "llama": (4, 2),
    "qwen": (4, 2),
    "t5": (10, 4),  # self attention and feed-forward on both sides, cross attention
    "bart": (10, 4),
    "vit": (4, 2),
}


@pytest.mark.parametrize("name", PLACES)
def test_sits_behind_attention_and_feed_forward(name: str) -> None:
    for placement, count in zip(("houlsby", "pfeiffer"), PLACES[name], strict=True):
        model = dppeft.wrap(architectures.build(name), "adapter", placement=placement)
        assert len(layers_of(model)) == count, (placement, list(layers_of(model)))


def test_some_layers_only() -> None:
    model = dppeft.wrap(tiny.build("bert"), "adapter", layers_to_transform=[1])
    assert len(layers_of(model)) == 2
    assert all(".layer.1." in name for name in layers_of(model))
    with pytest.raises(dppeft.DppeftError, match="layers_to_transform has no effect"):
        dppeft.wrap(
            tiny.build("bert"),
            "adapter",
            target_modules=r".*output\.dense",
            layers_to_transform=[1],
        )


def test_any_model_by_its_target_modules() -> None:
    net = nn.Sequential()
    net.add_module("inner", nn.Linear(4, 6))
    net.add_module("classifier", nn.Linear(6, 2))
    wrapped = tiny.wake(dppeft.wrap(net, "adapter", target_modules=["inner"], bottleneck=3))
    assert wrapped(torch.randn(5, 4)).shape == (5, 2)
    with pytest.raises(dppeft.DppeftError, match="No default target_modules"):
        dppeft.wrap(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), "adapter")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bottleneck": 0}, "bottleneck=0"),
        ({"bottleneck": True}, "bottleneck=True"),
        ({"placement": "both"}, "placement='both'"),
        ({"activation": "gellu"}, "activation='gellu'"),
        ({"r": 8}, "Unknown option 'r'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(dppeft.DppeftError, match=message):
        dppeft.wrap(tiny.build("bert"), "adapter", **options)


def test_a_layer_that_is_not_linear_is_refused() -> None:
    with pytest.raises(dppeft.DppeftError, match="LayerNorm is no linear layer"):
        dppeft.wrap(tiny.build("bert"), "adapter", target_modules=["LayerNorm"])


@pytest.mark.parametrize("method", ["adapter", "compacter"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_folding_keeps_the_outputs_and_refuses_to_be_saved(method: str, name: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build(name), method)).eval()
    batch = tiny.make_batch(name)
    before = model(**batch).logits
    folded = dppeft.merge(model).eval()
    assert not hasattr(folded, "peft_config")
    torch.testing.assert_close(folded(**batch).logits, before)
    with pytest.raises(dppeft.DppeftError, match="Save the adapter"):
        folded.state_dict()


def test_the_adapter_can_be_switched_off() -> None:
    batch = tiny.make_batch("bert")
    base = tiny.build("bert").eval()
    before = base(**batch).logits.detach()
    model = dppeft.wrap(tiny.build("bert"), "adapter", modules_to_save=None).eval()
    with torch.no_grad():
        for layer in layers_of(model).values():
            layer.bottleneck_networks["default"].up.weight.normal_()
        assert not torch.allclose(model(**batch).logits, before)
        with model.disable_adapter():
            assert torch.equal(model(**batch).logits, before)


def test_half_precision_base_keeps_its_dtype() -> None:
    model = dppeft.wrap(tiny.build("llama").bfloat16(), "adapter")
    logits = model(**tiny.make_batch("llama")).logits
    assert logits.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
