"""Everything, biases or LoRA on thirteen architectures, checkpointed or not, in two dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dppeft
from dppeft.loss import default_loss
from tests import architectures, oracle, tiny

METHODS = ("full", "bitfit", "lora")
CHECKPOINTING = {"off": None, "reentrant": True, "not reentrant": False}
# Their blocks cannot be checkpointed by transformers.
WITHOUT_CHECKPOINTING = ("resnet", "albert")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]


def made(name: str, method: str) -> nn.Module:
    base = architectures.build(name)
    options = architectures.LORA.get(name, {}) if method == "lora" else {}
    if name in ("resnet",) and method == "lora":
        options = {"target_modules": _convolutions(base)}
    return tiny.wake(dppeft.wrap(base, method, **options), std=0.1).train()


def _convolutions(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and "encoder" in n]


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", architectures.NAMES)
def test_exact_or_refused_with_the_remedy(name: str, method: str, mode: str) -> None:
    """Reentrant checkpoints drop gradients whose inputs need none; that alone may be refused."""
    model = made(name, method)
    batch, rows = architectures.batch_and_rows(name)
    truth = oracle.per_example(model, rows)
    if CHECKPOINTING[mode] is not None:
        if name in WITHOUT_CHECKPOINTING:
            pytest.skip("transformers cannot checkpoint it")
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTING[mode]})
    refused = ""
    try:
        found = dppeft.per_example_grads(model, batch)
    except dppeft.UnsupportedModelError as error:
        refused = str(error)
    if refused:
        assert mode == "reentrant"
        if "own backward fails" in refused:  # DeBERTa's: without dppeft, too
            assert "'use_reentrant': False" in refused
            return
        assert "enable_input_require_grads" in refused
        model.enable_input_require_grads()
        found = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(found, truth) < 1e-3
    bound = float(oracle.norms(truth).median())
    clipped = dppeft.clipped_sum(model, batch, max_grad_norm=bound)
    torch.testing.assert_close(clipped.norms, oracle.norms(truth).float(), rtol=1e-3, atol=1e-6)
    assert oracle.worst_error(clipped.grads, oracle.clipped_sum(truth, bound)) < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", architectures.NAMES)
def test_in_bfloat16_norms_and_sums_are_float32_of_the_same_gradients(
    name: str, method: str
) -> None:
    """Weights in bfloat16: each gradient is that of the model itself, within bfloat16's digits."""
    model = made(name, method).to(torch.bfloat16)
    batch, rows = architectures.batch_and_rows(name)
    batch, rows = _halved(batch), [_halved(row) for row in rows]
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = default_loss(model)
    alone = [
        torch.autograd.grad(loss(model, row).sum(), list(params.values()), allow_unused=True)
        for row in rows
    ]
    truth = {
        n: torch.stack([torch.zeros_like(p) if g[k] is None else g[k] for g in alone]).double()
        for k, (n, p) in enumerate(params.items())
    }
    bound = float(oracle.norms(truth).median())
    found = dppeft.clipped_sum(model, batch, max_grad_norm=bound)
    assert found.norms.dtype == torch.float32
    assert {grad.dtype for grad in found.grads.values()} == {torch.float32}
    torch.testing.assert_close(found.norms, oracle.norms(truth).float(), rtol=0.05, atol=1e-3)
    whole = oracle.clipped_sum(truth, bound)
    assert oracle.distance(found.grads, whole) < 0.05 * bound * len(rows)
    # Removing a row stays within the bound whatever the rounding of the model's own dtype.
    rest = {key: value[1:] for key, value in batch.items()}
    moved = oracle.distance(found.grads, dppeft.clipped_sum(model, rest, max_grad_norm=bound).grads)
    assert moved < 1.05 * bound


def _halved(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
