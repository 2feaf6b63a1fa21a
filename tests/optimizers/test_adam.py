"""PrivateAdam: its formulas, and that the noise it takes off is the noise there is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.errors import ArgumentError
from dppeft.loss import default_loss
from dppeft.optimizers import PrivateAdam, shrink
from dppeft.text import TokenDataset
from tests import oracle, tiny


def moved(grads: list[Tensor], stds: list[float], start: Tensor, **options: Any) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = PrivateAdam([parameter], **options)
    for grad, std in zip(grads, stds, strict=True):
        parameter.grad, optimizer.noise_std = grad.clone(), std
        optimizer.step()
    return parameter.detach()


def draws(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_without_corrections_it_is_adamw(weight_decay: float) -> None:
    grads, start = draws(6, 4), torch.ones(4, dtype=torch.float64)
    options = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    found = moved(grads, [0.7] * 6, start, second_moment="plain", **options)
    parameter = nn.Parameter(start.clone())
    plain = torch.optim.AdamW([parameter], **options)
    for grad in grads:
        parameter.grad = grad.clone()
        plain.step()
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-9)


def test_the_corrected_step_is_the_papers_formula() -> None:
    """Written out for scalars: constant noise, so that its moving average is its variance."""
    b1, b2, lr, floor, std = 0.9, 0.99, 0.01, 0.05, 0.6
    grads, theta, m, v = draws(8, 3), torch.zeros(3, dtype=torch.float64), 0.0, 0.0
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        corrected = torch.clamp(v / (1 - b2**t) - std**2, min=floor)
        theta = theta - lr * (m / (1 - b1**t)) / corrected.sqrt()
    found = moved(
        grads, [std] * 8, torch.zeros(3, dtype=torch.float64), lr=lr, betas=(b1, b2), floor=floor
    )
    torch.testing.assert_close(found, theta, rtol=1e-6, atol=1e-9)


def test_noise_that_changes_is_averaged_as_the_second_moment_is() -> None:
    """With g_t = s_t exactly the corrected moment is 0 at every step, whatever the s_t are."""
    stds = [0.1, 3.0, 0.5, 2.0]
    grads = [torch.full((2,), s, dtype=torch.float64) for s in stds]
    lr, floor, b1 = 0.01, 1e-4, 0.9
    found = moved(grads, stds, torch.zeros(2, dtype=torch.float64), lr=lr, floor=floor)
    m, theta = 0.0, 0.0
    for t, s in enumerate(stds, start=1):
        m = b1 * m + (1 - b1) * s
        theta -= lr * m / (1 - b1**t) / math.sqrt(floor)
    torch.testing.assert_close(
        found, torch.full((2,), theta, dtype=torch.float64), rtol=1e-6, atol=0
    )


def corrected_moment(told: float) -> float:
    """Mean corrected second moment of 20,000 coordinates, signal 1 under noise of std 2."""
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.zeros(20_000))
    optimizer = PrivateAdam([parameter], lr=0.0, betas=(0.9, 0.9))
    for _ in range(30):
        parameter.grad = 1 + 2 * torch.randn(20_000, generator=generator)
        optimizer.noise_std = told
        optimizer.step()
    state = optimizer.state[parameter]
    left = 1 - 0.9**30
    return float(state["second"].mean() - state["noise"]) / left


def test_what_is_left_is_the_square_of_the_signal() -> None:
    assert corrected_moment(2.0) == pytest.approx(1.0, abs=0.1)
    assert abs(corrected_moment(2.0 * 1.1) - 1.0) > 0.5  # a wrong size of the noise is seen
    assert abs(corrected_moment(0.0) - 1.0) > 3.0  # Adam's own


def test_a_private_run_says_how_large_the_noise_is(tmp_path: Path) -> None:
    model = dppeft.wrap(tiny.build("bert"), "lora")
    batch = tiny.make_batch("bert", batch_size=20, lengths=[5] * 20)
    rows = [{"input_ids": ids.tolist()} for ids in batch["input_ids"]]
    plan = dppeft.plan(
        num_examples=20,
        batch_size=10,
        batch_schedule=[5, 10],
        noise_multiplier=1.5,
        delta=1e-3,
        max_grad_norm=0.2,
    )
    optimizer = PrivateAdam([p for p in model.parameters() if p.requires_grad])
    run = dppeft.make_private(
        model,
        optimizer,
        TokenDataset(rows, batch["labels"].tolist()),
        plan,
        ledger=tmp_path / "ledger",
    )
    told = []
    for drawn in run.batches():
        run.step(drawn)
        told.append(optimizer.noise_std)
    assert told == pytest.approx([1.5 * 0.2 / 5, 1.5 * 0.2 / 10])


def test_what_it_cannot_do_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ArgumentError, match="does not know the noise in this gradient"):
        PrivateAdam([parameter]).step()
    for wrong, message in (
        ({"lr": -1.0}, "lr >= 0"),
        ({"floor": 0.0}, "floor"),
        ({"betas": (0.9, 1.0)}, r"betas in \[0, 1\)"),
        ({"second_moment": "prescale"}, "Did you mean 'prescaled'"),
        ({"second_moment": "prescaled", "shrinkage": True}, "Choose one of the two"),
    ):
        with pytest.raises(ArgumentError, match=message):
            PrivateAdam([parameter], **wrong)
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=2)
    optimizer = PrivateAdam([p for p in model.parameters() if p.requires_grad])
    plan = dppeft.plan(num_examples=4, batch_size=2, steps=1, noise_multiplier=1.0, delta=1e-3)
    batch = tiny.make_batch("bert")
    rows = [{n: v[i] for n, v in batch.items()} for i in range(4)]
    with pytest.raises(ArgumentError, match="what RGP's matrices move by is made of noised"):
        dppeft.make_private(model, optimizer, rows, plan)


# --- scale, then privatise ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"), [("bert", "lora"), ("bert-mlm", "full"), ("bert", "ia3")]
)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_scaled_gradients_are_clipped_as_scaled(name: str, method: str, clipping: str) -> None:
    """By the definition: each example's gradient times the scale, then clipped, then summed."""
    model, batch = tiny.wake(dppeft.wrap(tiny.build(name), method)), tiny.make_batch(name)
    generator = torch.Generator().manual_seed(4)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    scales = {n: torch.rand(p.shape, generator=generator) + 0.5 for n, p in trained.items()}
    rows = [tiny.row(batch, i) for i in range(4)]
    truth = {n: g * scales[n] for n, g in oracle.per_example(model, rows).items()}
    bound = float(oracle.norms(truth).median())
    of = {
        "flat": oracle.clipped_sum,
        "per_layer": oracle.clipped_sum_per_tensor,
        "automatic": oracle.normalised_sum,
    }[clipping]
    engine = make_engine(model, loss=default_loss(model), clipping=clipping)
    found = engine.clipped_sum(batch, max_grad_norm=bound, scales=scales)
    assert oracle.worst_error(found.grads, of(truth, bound)) < 1e-4
    plain = engine.clipped_sum(batch, max_grad_norm=bound)
    assert oracle.worst_error(plain.grads, of(truth, bound)) > 1e-2  # the scales matter


def test_a_run_clips_and_noises_in_the_optimizers_units_and_moves_in_its_own(
    tmp_path: Path,
) -> None:
    """Without noise and bound, prescaling changes nothing; with a bound it does."""
    results = {}
    for kind, bound in (("plain", 1e6), ("prescaled", 1e6), ("prescaled", 0.05), ("plain", 0.05)):
        model = dppeft.wrap(tiny.build("bert"), "bitfit")
        batch = tiny.make_batch("bert", batch_size=12, lengths=[5] * 12)
        rows = [{"input_ids": ids.tolist()} for ids in batch["input_ids"]]
        plan = dppeft.plan(
            num_examples=12,
            batch_size=6,
            steps=4,
            noise_multiplier=0.0,
            delta=1e-3,
            max_grad_norm=bound,
        )
        optimizer = PrivateAdam(
            [p for p in model.parameters() if p.requires_grad],
            0.01,
            second_moment=kind,
            eps=1e-3,  # a key's bias has no gradient but rounding, which Adam would enlarge
        )
        dataset = TokenDataset(rows, batch["labels"].tolist())
        run = dppeft.make_private(
            model, optimizer, dataset, plan, seed=1, ledger=tmp_path / f"{kind}{bound}"
        )
        for drawn in run.batches():
            run.step(drawn)
        results[kind, bound] = torch.cat([p.flatten() for p in model.parameters()]).detach()
        assert all(entry.l2_bound == bound for entry in run.ledger.entries)
    same = results["plain", 1e6], results["prescaled", 1e6]
    torch.testing.assert_close(*same, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(results["plain", 0.05], results["prescaled", 0.05], atol=1e-4)


def test_the_scales_are_of_released_values_and_keep_the_noises_energy() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = PrivateAdam([parameter], second_moment="prescaled", betas=(0.0, 0.0))
    assert optimizer.scales() == {}
    parameter.grad, optimizer.noise_std = torch.tensor([1.0, 2.0, 3.0, 0.0]), 1.0
    optimizer.step()
    v, mean = torch.tensor([1.0, 4.0, 9.0, 0.0]), 14 / 4
    scale = optimizer.scales()[parameter]
    torch.testing.assert_close(scale, (mean / (v + 1e-3 * mean)).sqrt())
    # Noise of one size, divided by the scale, has on average the size it had.
    assert float((1 / scale).square().mean()) == pytest.approx(1.0, rel=2e-3)


# --- shrinkage ------------------------------------------------------------------------------------


def low_rank(strengths: list[float], m: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, len(strengths), generator=generator).double())[0]
    right = torch.linalg.qr(torch.randn(n, len(strengths), generator=generator).double())[0]
    return (left * torch.tensor(strengths).double()) @ right.T


def test_noise_alone_shrinks_to_nothing_and_no_noise_leaves_all() -> None:
    generator = torch.Generator().manual_seed(2)
    noise = 0.3 * torch.randn(60, 200, generator=generator)
    # A little above the edge, because the largest singular value still varies at this size.
    assert float(shrink(noise, 0.3 * 1.05).norm()) == 0
    assert float(shrink(noise, 0.3 / 1.4).norm()) > 1  # a wrong size of the noise is seen
    torch.testing.assert_close(shrink(noise, 0.0), noise)


@pytest.mark.parametrize("shape", [(80, 240), (240, 80), (100, 100)])
def test_the_shrunk_values_are_gavish_and_donohos(shape: tuple[int, int]) -> None:
    """For a diagonal matrix the singular values are its entries: the formula, written out."""
    m, n = shape
    unit, beta = 0.5 * math.sqrt(max(m, n)), min(m, n) / max(m, n)
    values = [unit * y for y in (0.5, 0.999 * (1 + beta**0.5), 2.2, 3.0)]
    matrix = torch.zeros(m, n, dtype=torch.float64)
    for i, value in enumerate(values):
        matrix[i, i] = value
    found = shrink(matrix, 0.5).diagonal()[:4]
    expected = [
        unit * math.sqrt((y * y - beta - 1) ** 2 - 4 * beta) / y if y >= 1 + beta**0.5 else 0.0
        for y in (v / unit for v in values)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_shrinkage_is_nearer_to_the_signal_than_what_was_released_or_cut_off() -> None:
    std, unit = 1.0, math.sqrt(200)
    released_error, shrunk_error, cut_error = 0.0, 0.0, 0.0
    for seed in range(5):
        signal = low_rank([3.0 * unit, 1.5 * unit], 100, 200, seed)
        generator = torch.Generator().manual_seed(100 + seed)
        released = signal + std * torch.randn(100, 200, generator=generator).double()
        left, values, right = torch.linalg.svd(released, full_matrices=False)
        kept = values * (values > unit * (1 + math.sqrt(0.5)))
        released_error += float((released - signal).norm() ** 2)
        shrunk_error += float((shrink(released, std) - signal).norm() ** 2)
        cut_error += float(((left * kept) @ right - signal).norm() ** 2)
    assert shrunk_error < 0.9 * cut_error < 0.5 * released_error


def test_matrices_enter_the_first_moment_shrunk_and_vectors_as_they_are() -> None:
    matrix, vector = nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(30))
    optimizer = PrivateAdam([matrix, vector], lr=1.0, shrinkage=True, second_moment="plain", eps=0)
    generator = torch.Generator().manual_seed(3)
    matrix.grad = torch.randn(20, 30, generator=generator)
    vector.grad = torch.randn(30, generator=generator)
    optimizer.noise_std = 0.5
    optimizer.step()
    torch.testing.assert_close(-matrix.detach(), shrink(matrix.grad, 0.5) / matrix.grad.abs())
    torch.testing.assert_close(-vector.detach(), vector.grad.sign())
    with pytest.raises(ArgumentError, match=r"Expected a matrix, got a tensor of shape \(30,\)"):
        shrink(vector.grad, 0.5)


@pytest.mark.parametrize("kind", ["corrected", "prescaled"])
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    """What the optimizer knows of released gradients, scales included, is saved and comes back."""
    batch = tiny.make_batch("bert", batch_size=12, lengths=[5] * 12)
    rows = [{"input_ids": ids.tolist()} for ids in batch["input_ids"]]
    plan = dppeft.plan(
        num_examples=12, batch_size=6, steps=4, noise_multiplier=0.5, delta=1e-3, max_grad_norm=0.1
    )

    def start(name: str) -> tuple[nn.Module, Any]:
        model = dppeft.wrap(tiny.build("bert"), "bitfit")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = PrivateAdam(trained, 0.01, second_moment=kind, eps=1e-3, floor=1e-4)
        dataset = TokenDataset(rows, batch["labels"].tolist())
        return model, dppeft.make_private(
            model, optimizer, dataset, plan, seed=1, ledger=tmp_path / name
        )

    whole, run = start("whole")
    for drawn in run.batches():
        run.step(drawn)
    _, first = start("first")
    for drawn in first.batches(steps=2):
        first.step(drawn)
    first.save(tmp_path / "saved")
    rest, second = start("second")
    second.restore(tmp_path / "saved")
    for drawn in second.batches():
        second.step(drawn)
    for (name, one), other in zip(whole.named_parameters(), rest.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
