"""bfloat16 and eager attention: the same gradient up to rounding, and no trace afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dppeft
from dppeft.training.precision import EAGER_UP_TO, Computation, choose_precision
from tests.tiny import build, make_batch
from tests.training.runs import adapted_bert, make_plan, sgd, token_rows, trained, values

CPU = torch.device("cpu")


def clipped(model: nn.Module) -> dict[str, torch.Tensor]:
    return dppeft.clipped_sum(model, make_batch("bert"), max_grad_norm=1e9).grads


def norm(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in grads.values()]).norm())


def test_B15_bf16_gradient_is_near_and_sums_are_float32() -> None:
    model = adapted_bert()
    exact = clipped(model)
    with Computation(model, precision="bf16", device=CPU).active():
        layer = model.base_model.model.bert.encoder.layer[0]
        assert layer.output.dense.weight.dtype == torch.bfloat16
        assert all(p.dtype == torch.float32 for p in trained(model).values())
        near = clipped(model)
    assert all(grad.dtype == torch.float32 for grad in near.values())
    error = norm({name: near[name] - exact[name] for name in exact}) / norm(exact)
    assert 1e-6 < error < 0.02


def test_bf16_leaves_the_model_as_it_was() -> None:
    model = adapted_bert()
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    computation = Computation(model, precision="bf16", device=CPU)
    with pytest.raises(ZeroDivisionError), computation.active():
        _ = 1 / 0
    assert not torch.is_autocast_enabled("cpu")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_bf16_copies_follow_weights_changed_from_outside() -> None:
    model = adapted_bert()
    computation = Computation(model, precision="bf16", device=CPU)
    weight = model.base_model.model.bert.encoder.layer[0].output.dense.weight
    with computation.active():
        first = weight.data
    with computation.active():
        assert weight.data_ptr() == first.data_ptr()  # made once
    with torch.no_grad():
        weight.add_(1.0)
    with computation.active():
        assert weight.data_ptr() != first.data_ptr()
        torch.testing.assert_close(weight.float(), (first.float() + 1.0), rtol=0.01, atol=0.01)


def test_a_bf16_run_trains_float32_weights() -> None:
    model = adapted_bert()
    before = values(model)
    plan = make_plan(12, max_grad_norm=1.0, noise_multiplier=0.1)
    run = dppeft.make_private(model, sgd(model), token_rows(12), plan, precision="bf16")
    for batch in run.batches():
        run.step(batch)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if name in before:
            assert not torch.equal(parameter, before[name])


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama-classify", "t5", "distilbert"])
def test_eager_attention_gives_the_same_gradient(name: str) -> None:
    model = dppeft.wrap(build(name), "lora", r=2)
    config = model.config
    batch = make_batch(name)
    fused = dppeft.clipped_sum(model, batch, max_grad_norm=0.5).grads
    computation = Computation(model, precision="float32", device=CPU)
    before = config._attn_implementation
    with computation.attention_for(8):
        assert config._attn_implementation == "eager"
        eager = dppeft.clipped_sum(model, batch, max_grad_norm=0.5).grads
    assert config._attn_implementation == before == "sdpa"
    for key, grad in fused.items():
        torch.testing.assert_close(eager[key], grad, rtol=1e-4, atol=1e-5)


def test_long_rows_and_a_chosen_attention_are_left_alone() -> None:
    model = build("bert")
    with Computation(model, precision="float32", device=CPU).attention_for(EAGER_UP_TO + 1):
        assert model.config._attn_implementation == "sdpa"
    chosen = build("bert", attn_implementation="eager")
    with Computation(chosen, precision="float32", device=CPU).attention_for(4):
        assert chosen.config._attn_implementation == "eager"
    assert chosen.config._attn_implementation == "eager"


def test_precision_is_chosen_by_name_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("float32", CPU) == "float32"
    assert choose_precision("bf16", CPU) == "bf16"
    for native, expected in ((True, "bf16"), (False, "float32")):
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, probe, lambda native=native: native, raising=False)
        assert choose_precision("auto", CPU) == expected
    with pytest.raises(dppeft.DppeftError, match="Unknown precision='bf32'.*Choices: auto"):
        choose_precision("bf32", CPU)


def test_half_precision_trained_weights_are_refused() -> None:
    model = build("bert").bfloat16()
    with pytest.raises(dppeft.DppeftError, match="dtype bfloat16: .*Load the model with dtype"):
        dppeft.make_private(model, sgd(model), token_rows(12), make_plan(12))
