"""The proof passes exact models, and catches what would make clipping meaningless."""

from __future__ import annotations

import pytest
import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn

import dppeft
from dppeft.clipping.preflight import check
from dppeft.loss import default_loss
from tests import tiny
from tests.clipping.nets import Net, net_loss, tokens


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_exact_models_pass_with_the_counts(method: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert", hidden_dropout_prob=0.1), method=method))
    report = dppeft.preflight(model.train(), tiny.make_batch("bert"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert report.trained_tensors == len(trained)
    assert report.trained_parameters == sum(p.numel() for p in trained)
    assert report.worst_error < 1e-4
    assert 0.5 < report.worst_sensitivity <= 1 + 1e-4
    assert model.training


def test_tensors_without_signal_are_listed() -> None:
    model = Net()
    model.spare = nn.Linear(3, 3)
    report = dppeft.preflight(model, tokens(), loss=net_loss)
    assert report.without_signal == ("spare.weight", "spare.bias")


class CrossAttention(nn.Module):
    """Every example attends to the others' means."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1)
        return x + (torch.softmax(mean @ mean.T, -1) @ mean)[:, None]


def test_attention_across_examples_is_caught() -> None:
    with pytest.raises(dppeft.UnsupportedModelError, match="other examples"):
        dppeft.preflight(Net(CrossAttention()), tokens(), loss=net_loss)


def test_batch_norm_is_caught_by_name() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    with pytest.raises(dppeft.UnsupportedModelError, match=r"part\.norm: BatchNorm1d"):
        dppeft.preflight(Net(Normed()), tokens(), loss=net_loss)


def test_a_loss_averaged_over_the_tokens_of_the_batch_is_caught() -> None:
    model = tiny.build("gpt2")

    def batch_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        own = default_loss(model)(model, batch)
        used = (batch["labels"][:, 1:] != -100).sum(1)
        return own * used / used.sum()  # divides by the batch's number of targets

    with pytest.raises(dppeft.UnsupportedModelError, match="other examples"):
        dppeft.preflight(model, tiny.make_batch("gpt2"), loss=batch_mean)


def test_a_model_that_reads_its_padding_is_caught() -> None:
    """How much padding a row gets depends on the longest row of its batch."""

    def reads_padding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return net_loss(model, batch)

    batch = {**tokens(), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    with pytest.raises(dppeft.UnsupportedModelError, match="without padding"):
        dppeft.preflight(Net(), batch, loss=reads_padding)


def test_a_second_set_of_hooks_is_caught() -> None:
    model = Net()
    hooks = GradSampleHooks(model, strict=False)
    with pytest.raises(dppeft.UnsupportedModelError, match="Opacus's hooks are already"):
        dppeft.preflight(model, tokens(), loss=net_loss)
    hooks.cleanup()
    dppeft.preflight(model, tokens(), loss=net_loss)


def test_the_optimizer_must_hold_what_trains() -> None:
    model = Net()
    everything = list(model.parameters())
    with pytest.raises(dppeft.DppeftError, match=r"lacks 1 trained tensors, such as head\.bias"):
        check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything[:-1], lr=1))
    model.head.bias.requires_grad_(False)
    with pytest.raises(dppeft.DppeftError, match=r"do not train, such as head\.bias"):
        check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything, lr=1))
    check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything[:-1], lr=1))


def test_one_row_cannot_prove_anything() -> None:
    with pytest.raises(dppeft.DppeftError, match="at least 2 rows"):
        dppeft.preflight(Net(), tokens(1), loss=net_loss)
