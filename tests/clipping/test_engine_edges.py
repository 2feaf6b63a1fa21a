"""The engine at its edges: precision, randomness, rows that are not finite, traces, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from tests import oracle, tiny
from tests.clipping.nets import Net, definition, net_loss, stripped, tokens

# --- precision, randomness, checkpointing --------------------------------------------------------


def test_B15_low_precision_model_has_float32_norms_and_sums() -> None:
    exact = tiny.build("bert")
    model = copy.deepcopy(exact).bfloat16()
    batch = tiny.make_batch("bert", batch_size=64)
    bound = float(oracle.norms(stripped(exact, tiny.make_batch("bert"))).median())
    found = dppeft.clipped_sum(model, batch, max_grad_norm=bound)
    assert {g.dtype for g in found.grads.values()} == {torch.float32}
    assert found.norms.dtype == torch.float32
    wide = dppeft.clipped_sum(exact, batch, max_grad_norm=bound)
    scale = float(sum(g.square().sum() for g in wide.grads.values())) ** 0.5
    assert oracle.distance(found.grads, wide.grads) < 0.05 * scale
    rest = {key: value[1:] for key, value in batch.items()}
    moved = oracle.distance(found.grads, dppeft.clipped_sum(model, rest, max_grad_norm=bound).grads)
    assert moved <= bound * 1.01


def test_B15_autocast_has_float32_norms_and_sums() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert")))
    batch = tiny.make_batch("bert")
    truth = stripped(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = dppeft.clipped_sum(model, batch, max_grad_norm=1e9)
    assert {g.dtype for g in found.grads.values()} == {torch.float32}
    expected = oracle.clipped_sum(truth, 1e9)
    scale = float(sum(g.square().sum() for g in expected.values())) ** 0.5
    assert oracle.distance(found.grads, expected) < 0.05 * scale


class Noisy(nn.Module):
    """Draws numbers and reads its weight directly: replayed with the forward's own draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ self.weight, 0.5, self.training)


@pytest.mark.parametrize("kind", ["plain", "replayed", "lora"])
def test_B22_the_gradient_uses_the_dropout_of_the_forward(kind: str) -> None:
    if kind == "lora":
        model = tiny.wake(
            dppeft.wrap(tiny.build("bert", hidden_dropout_prob=0.3), lora_dropout=0.5)
        )
        batch, loss = tiny.make_batch("bert"), default_loss(model)
    else:
        part = Noisy() if kind == "replayed" else nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        model, batch, loss = Net(part), tokens(), net_loss
    model.train()
    engine = make_engine(model, loss=loss)
    engine.per_example_grads(batch)  # finds its units
    torch.manual_seed(11)
    found = engine.per_example_grads(batch)
    torch.manual_seed(11)
    params = [p for p in model.parameters() if p.requires_grad]
    summed = torch.autograd.grad(loss(model, batch).sum(), params)
    assert len(params) == len(found)
    for grads, total in zip(found.values(), summed, strict=True):
        torch.testing.assert_close(grads.sum(0), total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_name", ["bert", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_exact(model_name: str, method: str, reentrant: bool) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build(model_name), method=method))
    batch = tiny.make_batch(model_name)
    truth = stripped(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, truth) < 1e-3
    assert all(p.grad is None for p in model.parameters())


def test_reentrant_checkpointing_that_drops_gradients_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed.weight.requires_grad_(False)
            self.part = nn.Linear(6, 6)

        def body(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=True)

    with (
        pytest.warns(UserWarning, match="None of the inputs"),
        pytest.raises(dppeft.UnsupportedModelError, match="part runs without gradients"),
    ):
        dppeft.per_example_grads(Checkpointed(), tokens(), loss=net_loss)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_F2_both_attentions_with_padding(attention: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), method="dora"))
    model.base_model.model.set_attn_implementation(attention)
    batch = tiny.make_batch("bert")
    found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, stripped(model, batch)) < 1e-3


# --- rows that are not there, or not finite ------------------------------------------------------


def test_rows_that_are_not_finite_contribute_zero() -> None:
    model = tiny.build("bert")
    batch = tiny.make_batch("bert")
    loss = default_loss(model)

    def poisoned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch) * torch.where(batch["poison"].bool(), torch.nan, 1.0)

    poison = torch.tensor([0, 1, 0, 0])
    engine = make_engine(model, loss=poisoned)
    found = engine.clipped_sum({**batch, "poison": poison}, max_grad_norm=0.3)
    keep = [0, 2, 3]
    clean = dppeft.clipped_sum(
        model, {key: value[keep] for key, value in batch.items()}, max_grad_norm=0.3
    )
    assert not bool(found.norms[1].isfinite())
    assert oracle.distance(found.grads, clean.grads) < 1e-5
    every = engine.clipped_sum({**batch, "poison": torch.ones(4)}, max_grad_norm=0.3)
    assert all(float(g.abs().max()) == 0 for g in every.grads.values())


def test_empty_batch_gives_zeros_and_the_model_is_not_called() -> None:
    model = tiny.build("bert")
    empty = {key: value[:0] for key, value in tiny.make_batch("bert").items()}

    def refuse(*_: object) -> None:
        raise AssertionError("called")

    model.register_forward_pre_hook(refuse)
    found = dppeft.clipped_sum(model, empty, max_grad_norm=1.0)
    assert found.count == 0
    assert found.norms.shape == (0,)
    assert all(float(g.abs().sum()) == 0 for g in found.grads.values())
    assert {n: g.shape for n, g in found.grads.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }


# --- nothing stays -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "opacus"])
@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_nothing_stays_on_the_model(engine: str, method: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), method=method))
    batch = tiny.make_batch("bert")
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)  # a user's own backward

    def traces() -> list[object]:
        seen: list[object] = []
        for path, module in model.named_modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            seen.append((path, sorted(vars(module)), [len(h) for h in hooks], module.training))
        for name, p in model.named_parameters():
            seen.append((name, id(p), p.requires_grad, sorted(vars(p)), bool((p.grad == 7).all())))
        return [*seen, torch.get_rng_state().tolist()]

    before = traces()
    if engine == "opacus" and method == "ia3":
        with pytest.raises(dppeft.UnsupportedModelError):
            dppeft.clipped_sum(model, batch, max_grad_norm=1.0, engine=engine)
    else:
        dppeft.clipped_sum(model, batch, max_grad_norm=1.0, engine=engine)
    assert traces() == before


def test_nothing_stays_after_an_error_in_the_forward() -> None:
    model, batch = Net(), tokens()
    engine = make_engine(model, loss=net_loss)
    engine.per_example_grads(batch)
    with pytest.raises(IndexError):
        engine.per_example_grads({**batch, "input_ids": batch["input_ids"] + 100})
    assert all(p.requires_grad for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_two_engines_on_one_model_do_not_meet() -> None:
    model, batch = Net(), tokens()
    first, second = (make_engine(model, loss=net_loss) for _ in range(2))
    alone = first.per_example_grads(batch)

    def nested(model: nn.Module, inner: dict[str, Tensor]) -> Tensor:
        first.per_example_grads(batch)  # another engine runs in the middle of this one's forward
        return net_loss(model, inner)

    for found in (make_engine(model, loss=nested), second):
        assert oracle.worst_error(found.per_example_grads(batch), alone) < 1e-6


def test_another_set_of_trained_parameters_is_noticed() -> None:
    model, batch = Net(), tokens()
    model.embed.weight.requires_grad_(False)
    engine = make_engine(model, loss=net_loss)
    assert set(engine.per_example_grads(batch)) == {"head.weight", "head.bias"}
    model.embed.weight.requires_grad_(True)
    found = engine.per_example_grads(batch)
    assert oracle.worst_error(found, definition(model, batch, net_loss)) < 1e-4


# --- refusals ------------------------------------------------------------------------------------


def test_batch_norm_is_refused_by_name() -> None:
    model = Net()
    model.norm = nn.BatchNorm1d(6)
    with pytest.raises(dppeft.UnsupportedModelError, match="norm: BatchNorm1d.*GroupNorm"):
        dppeft.per_example_grads(model, tokens(), loss=net_loss)


@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_a_layer_that_mixes_examples_is_refused(engine: str) -> None:
    class Mixing(Net):
        def body(self, x: Tensor) -> Tensor:
            return x - 0.1 * x.mean(0, keepdim=True)

    with pytest.raises(dppeft.UnsupportedModelError):
        dppeft.per_example_grads(Mixing(), tokens(), loss=net_loss, engine=engine)


def test_a_router_that_averages_over_the_batch_is_refused() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), method="lily"), std=0.05)
    with pytest.raises(dppeft.UnsupportedModelError, match="changes with the other examples"):
        dppeft.per_example_grads(model, tiny.make_batch("bert"))


@pytest.mark.parametrize("reduced", [Tensor.mean, Tensor.sum, lambda x: x[:, None]])
def test_a_reduced_loss_is_refused(reduced) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(dppeft.DppeftError, match="one value per example"):
        dppeft.per_example_grads(Net(), tokens(), loss=lambda m, b: reduced(net_loss(m, b)))


def test_a_gradient_hook_never_sees_a_private_gradient() -> None:
    model, seen = Net(), []
    plain = dppeft.per_example_grads(model, tokens(), loss=net_loss)
    model.head.weight.register_hook(lambda grad: seen.append(grad) or grad / 10)
    found = dppeft.per_example_grads(model, tokens(), loss=net_loss)
    assert not seen
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    net_loss(model, tokens()).sum().backward()
    assert len(seen) == 1  # it is back for others


def test_a_step_inside_the_backward_is_refused() -> None:
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(dppeft.UnsupportedModelError, match="head.weight has a hook"):
        dppeft.per_example_grads(model, tokens(), loss=net_loss)


def test_nothing_to_train_is_refused() -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(dppeft.DppeftError, match="No parameter requires a gradient"):
        dppeft.clipped_sum(model, tokens(), max_grad_norm=1.0, loss=net_loss)


@pytest.mark.parametrize("bound", [0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(bound: float) -> None:
    with pytest.raises(dppeft.DppeftError, match="max_grad_norm"):
        dppeft.clipped_sum(Net(), tokens(), max_grad_norm=bound, loss=net_loss)


@pytest.mark.parametrize("option", [{"engine": "opcus"}, {"clipping": "flatt"}])
def test_a_misspelt_option_names_the_nearest(option: dict[str, str]) -> None:
    with pytest.raises(dppeft.DppeftError, match="Did you mean"):
        dppeft.clipped_sum(Net(), tokens(), max_grad_norm=1.0, loss=net_loss, **option)
