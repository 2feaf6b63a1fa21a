"""Weight decay: closed forms, the stationary size under noise, what decays, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.optimizers.decay import AdamWTowardsStart, decay_groups, feeding_a_norm
from dppeft.training import state
from tests.tiny import build

LR, SIZE = 0.01, 0.1


def _rms(tensor):
    return float(tensor.detach().square().mean().sqrt())


def _settled(decay_factor):
    """rms after 1,200 AdamW steps on pure noise, with the automatic decay times a factor."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.dense, model.norm = nn.Linear(64, 64, bias=False), nn.LayerNorm(64)
    nn.init.normal_(model.dense.weight, std=SIZE, generator=generator)
    start = _rms(model.dense.weight)
    groups = decay_groups(model, lr=LR)
    groups[0]["weight_decay"] *= decay_factor
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    squares = []
    for step in range(1200):
        weight = model.dense.weight
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        if step >= 400:
            squares.append(_rms(weight) ** 2)
    return (sum(squares) / len(squares)) ** 0.5 / start


def test_the_automatic_decay_holds_the_size_under_pure_noise():
    """4,096 weights: the mean over 800 steps is off by well under 4 %; 1.4 is far outside."""
    assert abs(_settled(1.0) - 1) < 0.04
    # lambda off by 2 is a size off by 1.41, either way.
    assert _settled(0.5) == pytest.approx(2**0.5, rel=0.06)
    assert _settled(2.0) == pytest.approx(0.5**0.5, rel=0.06)


def test_each_group_has_its_closed_form():
    model = build("bert-mlm")
    lr = 0.003
    groups = decay_groups(model, lr=lr)
    names = feeding_a_norm(model)
    named = dict(model.named_parameters())
    for name, group in zip(names, groups, strict=False):
        (parameter,) = group["params"]
        assert parameter is named[name]
        mean_square = sum(v * v for v in parameter.flatten().tolist()) / parameter.numel()
        assert group["weight_decay"] == pytest.approx(lr / 2 / mean_square, rel=1e-6)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert groups[-1]["weight_decay"] == 0
    # BERT's: 0.63 at rms 0.02 and rate 5e-4.
    with torch.no_grad():
        named[names[0]].fill_(0.02)
    assert decay_groups(model, lr=5e-4)[0]["weight_decay"] == pytest.approx(0.625)


FEEDING = {
    "bert-mlm": [
        "word",
        "position",
        "token_type",
        *["attention.output", "output"] * 2,
        "transform",
    ],
    "roberta-mlm": ["word", "token_type", "position", *["attention.output", "output"] * 2, "head"],
}


@pytest.mark.parametrize("name", FEEDING)
def test_the_layers_before_a_norm_are_found_by_position(name):
    found = feeding_a_norm(build(name))
    assert len(found) == len(FEEDING[name])
    for full, part in zip(found, FEEDING[name], strict=True):
        assert part in full
    assert not any(part in full for full in found for part in ("query", "key", "intermediate"))


def test_albert_repeats_the_norm_but_not_the_projections():
    found = feeding_a_norm(build("albert"))
    assert not any("query" in name or "value" in name for name in found)
    assert any(name.endswith("attention.dense.weight") for name in found)


def test_named_tensors_take_the_place_of_the_rule_and_a_number_of_auto():
    model = build("gpt2")
    name = "transformer.h.0.attn.c_proj.weight"
    decaying, rest = decay_groups(model, lr=0.01, weight_decay=0.3, tensors=[name, name])
    assert [id(p) for p in decaying["params"]] == [id(dict(model.named_parameters())[name])]
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)


def test_what_cannot_decay_is_refused():
    with pytest.raises(ArgumentError, match="trains no linear layer or embedding"):
        decay_groups(build("gpt2"), lr=0.01)
    with pytest.raises(ArgumentError, match="trains no linear layer or embedding"):
        decay_groups(dppeft.wrap(build("bert"), "lora"), lr=0.01)
    model = build("bert-mlm")
    name = "bert.embeddings.word_embeddings.weight"
    with pytest.raises(ArgumentError, match=f"Did you mean '{name}'"):
        decay_groups(model, lr=0.01, tensors=[name + "s"])
    with pytest.raises(ArgumentTypeError, match="list of names"):
        decay_groups(model, lr=0.01, tensors=name)
    with pytest.raises(ArgumentError, match="names nothing that decays"):
        decay_groups(model, lr=0.01, tensors=[])
    with pytest.raises(ArgumentError, match="Unknown weight_decay='atuo'. Choices: auto"):
        decay_groups(model, lr=0.01, weight_decay="atuo")
    with pytest.raises(ArgumentError, match=r"lr \* weight_decay < 1"):
        decay_groups(model, lr=1.0, weight_decay=1.0)
    with pytest.raises(ArgumentError, match="lr=1 is too large for 'bert.embeddings"):
        decay_groups(model, lr=1.0)
    with torch.no_grad():
        dict(model.named_parameters())[name].zero_()
    with pytest.raises(ArgumentError, match="all zero"):
        decay_groups(model, lr=0.01)


# ---- towards the start


def _steps(optimizer, weight, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        optimizer.step()


def test_the_start_is_a_shift_of_adamw():
    """theta - start moves as AdamW's theta would from 0, with the same gradients."""
    start = torch.linspace(-3, 3, 8, dtype=torch.float64)
    ours = nn.Parameter(start.clone())
    theirs = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    common = {"lr": 0.05, "weight_decay": 2.0, "betas": (0.7, 0.9)}
    _steps(AdamWTowardsStart([ours], **common), ours, 30)
    _steps(torch.optim.AdamW([theirs], **common), theirs, 30)
    torch.testing.assert_close(ours.detach() - start, theirs.detach(), rtol=0, atol=1e-12)
    assert float(theirs.detach().abs().max()) > 0.05


def test_without_gradients_it_goes_back_to_the_start_by_the_closed_form():
    weight = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    optimizer = AdamWTowardsStart([weight], lr=0.1, weight_decay=1.0, betas=(0.0, 0.0))
    _steps(optimizer, weight, 1)
    gap = weight.item() - 5.0
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.item() - 5.0 == pytest.approx(gap * 0.9**3, rel=1e-9)
    assert optimizer.param_groups[0]["weight_decay"] == 1.0


def test_the_start_is_saved_and_restored(tmp_path):
    weight = nn.Parameter(torch.full((4,), 3.0))
    optimizer = AdamWTowardsStart([weight], lr=0.05, weight_decay=2.0)
    _steps(optimizer, weight, 5)
    state.save_state(tmp_path, trained={"w": weight}, optimizer=optimizer, manifest={})
    other = nn.Parameter(torch.zeros(4))  # not the start of the saved run
    again = AdamWTowardsStart([other], lr=0.05, weight_decay=2.0)
    state.load_state(tmp_path, state.read_manifest(tmp_path), trained={"w": other}, optimizer=again)
    twin = copy.deepcopy(weight)
    twin_optimizer = AdamWTowardsStart([twin], lr=0.05, weight_decay=2.0)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for used, parameter in ((optimizer, weight), (again, other), (twin_optimizer, twin)):
        _steps(used, parameter, 5, seed=1)
    assert torch.equal(weight, other)
    assert torch.equal(weight, twin)
    assert torch.equal(again.state[other]["start"], torch.full((4,), 3.0))


def test_tensors_without_a_gradient_stay_and_a_closure_is_called():
    still, moving = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamWTowardsStart([still, moving], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = moving.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert torch.equal(still, torch.ones(2))
    assert not torch.equal(moving, torch.ones(2))
    with pytest.raises(ArgumentError, match="overshoot the start"):
        AdamWTowardsStart([still], lr=1.0, weight_decay=1.0)
