"""Bases of 4, 8 or 16 bits under adapters of 32: exact, or refused before a row is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import dppeft
from dppeft.training.precision import check_quantised
from tests.oracle import own_loss, per_example, worst_error
from tests.tiny import build, make_batch, row, wake
from tests.training.placed import ROWS, first_layer, make_run, refused
from tests.training.runs import adapted_bert, make_plan, sgd, trained

# D7: quantised bases


class EightBits(nn.Linear):
    """A linear layer that holds its weight in 8 bits, as Linear4bit and Linear8bitLt do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.bias = linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter(  # 128 is zero
            ((linear.weight.detach() / scale).round() + 128).to(torch.uint8), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.to(x.dtype) - 128) * self.scale
        return nn.functional.linear(x, weight, self.bias)


def replace_linears(model: nn.Module, make: Any) -> nn.Module:
    """The model with every linear layer of its encoder made anew."""
    encoder = model.bert.encoder
    for path, module in list(encoder.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(encoder.get_submodule(parent), name, make(module))
    return model


def quantised(**adapter: Any) -> nn.Module:
    base = replace_linears(build("bert").requires_grad_(False), EightBits)
    return wake(dppeft.wrap(base, "lora", r=4, **adapter))


def test_D7_lora_beside_8_bit_weights_has_exact_gradients() -> None:
    model = quantised()
    batch = make_batch("bert")
    weights = [p for name, p in model.named_parameters() if p.dtype == torch.uint8]
    assert len(weights) == 12
    truth = per_example(model, [row(batch, i) for i in range(4)])
    assert worst_error(dppeft.per_example_grads(model, batch), truth) < 1e-4


def test_D7_lora_beside_8_bit_weights_trains_in_float32() -> None:
    model = quantised()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = make_run(model)
    for batch in run.batches():
        run.step(batch)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad
        assert p.dtype == (torch.float32 if p.requires_grad else before[name].dtype)


@pytest.mark.parametrize("sign", ["dtype", "quantization_method", "is_loaded_in_4bit"])
def test_D7_full_fine_tuning_of_a_quantised_base_is_refused(sign: str) -> None:
    base = build("bert")
    if sign == "dtype":
        base = replace_linears(base, EightBits)
    else:  # packed into buffers, as GPTQ and AWQ do: only the model says so
        setattr(base, sign, "gptq")
    model = dppeft.wrap(base, "full")
    refused(r"quantised.*method='full'.*dppeft.wrap\(model, 'lora'\)", model)
    base.is_quantized = False  # after dequantize()
    if sign != "dtype":
        make_run(model)


def test_D7_adapters_may_be_all_that_is_not_quantised() -> None:
    net = nn.Sequential(EightBits(nn.Linear(4, 2, bias=False)))
    check_quantised(get_peft_model(net, LoraConfig(target_modules=["0"])))


class Params4bit(nn.Parameter):
    """By name what bitsandbytes has."""


def test_D7_a_quantised_weight_that_trains_is_refused() -> None:
    model = adapted_bert()
    dense = first_layer(model).output.dense
    dense.weight = Params4bit(dense.weight.detach(), requires_grad=True)
    refused(r"output\.dense\.weight is a Params4bit; expected a plain nn.Parameter", model)


class Linear8bitLt(nn.Linear):
    """By name what bitsandbytes has: ``state.threshold`` says what an outlier is."""

    class _State:
        threshold = 6.0

    state = _State()


def test_D7_outliers_of_a_batch_are_not_an_examples_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_bert()
    first_layer(model).output.dense.__class__ = Linear8bitLt
    refused(
        r"output\.dense: Linear8bitLt with threshold=6 .*outliers of its whole batch.*"
        r"llm_int8_threshold=0.0",
        model,
    )
    monkeypatch.setattr(Linear8bitLt._State, "threshold", 0.0)
    make_run(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_D7_lora_beside_bitsandbytes_has_exact_gradients(bits: int) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="the extra dppeft[quantised] is not installed")

    def make(linear: nn.Linear) -> nn.Module:
        shape = (linear.in_features, linear.out_features)
        if bits == 4:
            made = bnb.nn.Linear4bit(*shape, compute_dtype=torch.float32, quant_type="nf4")
            weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        else:
            made = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=0.0)
            weight = bnb.nn.Int8Params(
                linear.weight.data, requires_grad=False, has_fp16_weights=False
            )
        made.weight, made.bias = weight, linear.bias
        return made.to("cpu")

    base = replace_linears(build("bert").requires_grad_(False), make)
    setattr(base, f"is_loaded_in_{bits}bit", True)
    model = wake(dppeft.wrap(base, "lora", r=4))
    assert "bnb" in type(first_layer(model).attention.self.query).__module__
    make_run(model)
    batch = make_batch("bert")
    names = list(trained(model))
    found = dppeft.per_example_grads(model, batch)
    for i in range(4):
        grads = torch.autograd.grad(own_loss(model, row(batch, i)), list(trained(model).values()))
        for name, grad in zip(names, grads, strict=True):
            torch.testing.assert_close(found[name][i], grad, rtol=1e-4, atol=1e-5)


# A16: frozen weights of 16 bits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_A16_a_16_bit_base_trains_under_float32_adapters(dtype: torch.dtype) -> None:
    model = wake(dppeft.wrap(build("gpt2").to(dtype), "lora", r=4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{**one, "labels": one["input_ids"]} for one in ROWS]
    run = dppeft.make_private(model, sgd(model), rows, make_plan(8, noise_multiplier=0.1))
    run.step(next(run.batches()))
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else dtype)
        assert torch.equal(p, before[name]) is not p.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_A16_a_head_that_PEFT_copies_in_16_bits_is_refused(dtype: torch.dtype) -> None:
    model = dppeft.wrap(build("bert").to(dtype), "lora", r=4)
    refused(r"dtype b?float16: .*classifier.*Load the model with dtype=torch.float32", model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_A16_16_bit_weights_that_train_are_refused(dtype: torch.dtype) -> None:
    model = adapted_bert().to(dtype)
    refused(rf"dtype {str(dtype).removeprefix('torch.')}: .*Load the model with dtype", model)
