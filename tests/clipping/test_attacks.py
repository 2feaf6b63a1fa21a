"""Ways in which one example once moved the sum by more than the bound, and no longer does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.clipping.terms import Outer, norms_sq_of, weighted_sum
from tests import oracle
from tests.clipping.nets import Net, net_loss, tokens


class OneLayer(nn.Module):
    """T = 2 positions whose output gradients cancel but for a little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def cancelling_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])  # (B, 2, 64)
    return (out[:, 0] - out[:, 1]).float().sum(-1)


def cancelling_rows(difference: float, scale: float, count: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 64, generator=g) * scale
    near = x + difference * scale * torch.randn(count, 1, 64, generator=g)
    return {"x": torch.cat([x, near], 1), "labels": torch.zeros(count)}


def moved(engine, batch: dict[str, Tensor], bound: float) -> float:  # type: ignore[no-untyped-def]
    """Largest move of the sum, in bounds, when a row goes or stands alone."""
    whole = engine.clipped_sum(batch, max_grad_norm=bound)
    worst = 0.0
    for row in range(len(batch["labels"])):
        rest = {k: torch.cat([v[:row], v[row + 1 :]]) for k, v in batch.items()}
        part = engine.clipped_sum(rest, max_grad_norm=bound)
        worst = max(worst, oracle.distance(whole.grads, part.grads) / bound)
    return worst


@pytest.mark.parametrize(("difference", "scale"), [(1e-4, 100.0), (1e-4, 1000.0), (1e-3, 10.0)])
def test_positions_that_cancel_are_not_taken_for_a_gradient_of_zero(
    difference: float, scale: float
) -> None:
    model, batch = OneLayer(), cancelling_rows(difference, scale)
    engine = make_engine(model, loss=cancelling_loss)
    assert moved(engine, batch, 0.1) < 1.001
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(2)]
    truth = oracle.norms(oracle.per_example(model, rows, double_loss))
    norms = engine.clipped_sum(batch, max_grad_norm=0.1).norms.double()
    assert bool((norms > 0.999 * truth).all())
    # Above it by no more than what the float32 sum may round: 1e-6 of the positions' lengths.
    torch.testing.assert_close(norms, truth, rtol=0.03, atol=0)


def test_what_a_cancelling_row_releases_is_within_its_measured_norm() -> None:
    """Three positions that add up to zero: in float32 they do not, and that is covered."""
    g = torch.Generator().manual_seed(0)
    a, b, right = (1e4 * torch.randn(64, generator=g) for _ in range(3))
    left = torch.stack([a, b, -(a + b)])[None]
    term = Outer(left, right.expand(1, 3, 64).contiguous())
    released = weighted_sum(term, torch.ones(1), (64, 64)).norm()
    assert 0 < released <= norms_sq_of({"w": term})["w"].sqrt()


def double_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    return (out[:, 0] - out[:, 1]).sum(-1)


@pytest.mark.parametrize("difference", [0.3, 0.1, 0.03])
def test_B15_norms_and_sums_leave_autocast(difference: float) -> None:
    model, batch = OneLayer(), cancelling_rows(difference, 1.0)
    engine = make_engine(model, loss=cancelling_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moved(engine, batch, 0.1) < 1.001


class Custom(nn.Module):
    """Batch statistics by hand, in training mode only; no layer's type gives it away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.3 * x.mean(0, keepdim=True) if self.training else x


class Remembering(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("memory", torch.zeros(6))
        else:
            self.memory = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.memory
        self.memory = 0.9 * self.memory + 0.1 * x.detach().mean((0, 1))
        return out


class ByContent(nn.Module):
    """Sorts the rows, works on them, puts them back: row i is not at place i inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        return self.layer(x[order])[order.argsort()]


class OverTheBatch(nn.Module):
    """An LSTM without batch_first, given batch-first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    "part",
    [
        Custom(),
        Remembering(buffer=False),
        Remembering(buffer=True),
        ByContent(),
        OverTheBatch(),
        nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_rows_that_meet_in_hidden_ways_are_refused(part: nn.Module) -> None:
    model = Net(part).train()
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(dppeft.UnsupportedModelError):
        dppeft.clipped_sum(model, tokens(), max_grad_norm=1.0, loss=net_loss)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_batch_norm_that_leaves_eval_mode_is_noticed() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    model, batch = Net(Normed()).train(), tokens()
    model.part.norm.eval()
    engine = make_engine(model, loss=net_loss)
    engine.clipped_sum(batch, max_grad_norm=1.0)
    model.train()
    with pytest.raises(dppeft.UnsupportedModelError, match=r"part\.norm: BatchNorm1d"):
        engine.clipped_sum(batch, max_grad_norm=1.0)


def test_a_detached_loss_is_refused() -> None:
    with pytest.raises(dppeft.UnsupportedModelError, match="depends on no trained parameter"):
        dppeft.clipped_sum(
            Net(), tokens(), max_grad_norm=1.0, loss=lambda m, b: net_loss(m, b).detach()
        )


def test_gradients_switched_off_around_the_call() -> None:
    with torch.no_grad():
        found = dppeft.per_example_grads(Net(), tokens(), loss=net_loss)
    assert float(found["head.bias"].abs().max()) > 0
    with torch.inference_mode(), pytest.raises(dppeft.DppeftError, match="inference_mode"):
        dppeft.clipped_sum(Net(), tokens(), max_grad_norm=1.0, loss=net_loss)


class Twice(nn.Module):
    """One layer called on two inputs, at T and T' positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(y)


def _paired_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    one, other = model(batch["x"], batch["y"])
    return (one * batch["w"]).flatten(1).sum(1) + (other * batch["z"]).flatten(1).sum(1)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("positions", [(4, 4), (24, 24), (64, 4), (40, 10)])
def test_a_row_that_cancels_stays_within_the_bound_however_it_is_measured(
    positions: tuple[int, int], scaled: bool
) -> None:
    """In Grams, from gradients that are made, as a sum of kinds, and in an optimizer's units."""
    torch.manual_seed(0)
    model, generator = Twice(), torch.Generator().manual_seed(1)
    batch = {
        name: torch.randn(60, length, 64, generator=generator) * size
        for name, length, size in zip(
            "xwyz", (positions[0],) * 2 + (positions[1],) * 2, (0.1, 1.0) * 2, strict=True
        )
    }
    large = (torch.randint(0, 2, (64,), generator=generator) * 2.0 - 1) * 2.0**34
    sign = torch.randint(0, 2, (64,), generator=generator) * 2.0 - 1
    crafted = {name: torch.zeros(1, *value.shape[1:]) for name, value in batch.items()}
    crafted["x"][0, 0] = crafted["y"][0, 0] = large
    crafted["w"][0, 0], crafted["z"][0, 0] = sign, -sign  # the two uses cancel exactly
    more = {n: torch.cat([v[:30], crafted[n], v[30:]]) for n, v in batch.items()}
    scales = {"layer.weight": torch.ones(64, 64)} if scaled else None
    engine = make_engine(model, loss=_paired_loss)
    without, with_row = (
        engine.clipped_sum(rows, max_grad_norm=1.0, scales=scales) for rows in (batch, more)
    )
    moved = with_row.grads["layer.weight"].double() - without.grads["layer.weight"].double()
    assert float(moved.norm()) <= 1.0
