"""Each closed form equals the layer's own gradient for each example, at any number of axes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dppeft.clipping.engine import make_engine
from dppeft.clipping.rules import find_rule
from dppeft.clipping.terms import (
    Dense,
    Lookup,
    Outer,
    Sum,
    Term,
    Tied,
    add,
    norms_sq_of,
    weighted_sum,
)

B = 5
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear, one axis between": (lambda: nn.Linear(4, 3), (7, 4)),
    "linear, three axes between": (lambda: nn.Linear(4, 3), (2, 3, 2, 4)),
    "linear, long": (lambda: nn.Linear(40, 30), (3, 40)),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), (7, 4)),
    "conv1d of gpt-2": (lambda: Conv1D(3, 4), (7, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (7, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (7, 4)),
    "layer norm over two axes": (lambda: nn.LayerNorm((7, 4)), (2, 7, 4)),
    "rms norm": (lambda: nn.RMSNorm(4, eps=1e-6), (7, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "conv2d, dilation": (lambda: nn.Conv2d(4, 6, 2, dilation=2, bias=False), (4, 5, 5)),
}


def own_gradients(layer: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    params = dict(layer.named_parameters())
    rows = [
        torch.autograd.grad(layer(x[i : i + 1]), list(params.values()), cotangent[i : i + 1])
        for i in range(len(x))
    ]
    return {n: torch.stack([row[k] for row in rows]) for k, n in enumerate(params)}


def check(term, truth: Tensor) -> None:  # type: ignore[no-untyped-def]
    factors = torch.rand(len(truth), dtype=truth.dtype)
    flat = truth.reshape(len(truth), -1)
    torch.testing.assert_close(term.instantiate(), truth)
    torch.testing.assert_close(term.instantiate(slice(1, 3)), truth[1:3])
    torch.testing.assert_close(term.norms_sq(), flat.square().sum(1))
    torch.testing.assert_close(
        weighted_sum(term, factors, truth.shape[1:]), torch.tensordot(factors, truth, 1)
    )
    keep = torch.tensor([True] * len(truth))
    keep[1] = False
    torch.testing.assert_close(
        term.without(~keep).instantiate(), truth * keep.view(-1, *[1] * (truth.dim() - 1))
    )
    assert term.batch == len(truth)


@pytest.mark.parametrize("name", LAYERS)
def test_rule_equals_the_gradient_of_each_example(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn(B, *shape, dtype=torch.float64)
    cotangent = torch.randn_like(layer(x))
    rule = find_rule(layer, [n for n, _ in layer.named_parameters()])
    assert rule is not None
    terms = rule(layer, x, cotangent.detach())
    truth = own_gradients(layer, x, cotangent)
    assert terms.keys() == truth.keys()
    for parameter, term in terms.items():
        check(term, truth[parameter])


@pytest.mark.parametrize("make", [lambda: nn.Linear(9, 8), lambda: Conv1D(8, 9)])
@pytest.mark.parametrize("reached", [[0], [6], [0, 1], [1, 3, 6]])
def test_positions_without_gradients_are_left_out(make, reached: list[int]) -> None:  # type: ignore[no-untyped-def]
    """As in the last layer of a classifier that reads the first token: exact, and less work."""
    layer = make().double()
    x = torch.randn(B, 7, 9, dtype=torch.float64)
    cotangent = torch.zeros(B, 7, 8, dtype=torch.float64)
    cotangent[:, reached] = torch.randn(B, len(reached), 8, dtype=torch.float64)
    cotangent[1, reached[0]] = 0  # one row's zero does not make the position unreached
    rule = find_rule(layer, ["weight", "bias"])
    assert rule is not None
    terms, truth = rule(layer, x, cotangent), own_gradients(layer, x, cotangent)
    for parameter, term in terms.items():
        check(term, truth[parameter])
    if isinstance(terms["weight"], Outer):
        assert terms["weight"].left.shape[1] == len(reached)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5e19])
def test_B3_leaving_positions_out_never_depends_on_the_neighbours(value: float) -> None:
    """Bad values where only the last row looks: with it or without, the others count the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    x = torch.randn(7, 8, 32)
    x[:-1, 7] = value
    labels = torch.tensor([0] * 6 + [7])  # which position a row reads
    batch = {"x": x, "labels": labels}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        return out[torch.arange(len(out)), batch["labels"]].square().sum(-1)

    engine = make_engine(model, loss=loss)
    clean = {"x": torch.randn(7, 8, 32), "labels": labels}
    engine.clipped_sum(clean, max_grad_norm=1.0)
    whole = engine.clipped_sum(batch, max_grad_norm=1.0)
    rest = engine.clipped_sum({k: v[:-1] for k, v in batch.items()}, max_grad_norm=1.0)
    moved = sum((whole.grads[n] - rest.grads[n]).square().sum() for n in whole.grads) ** 0.5
    assert float(moved) <= 1.0 + 1e-4


def test_matrices_with_one_input_share_its_gram_and_keep_their_norms() -> None:
    torch.manual_seed(0)
    x, other = torch.randn(2, B, 70, 128).double()  # more than one block of positions
    terms: dict[str, Term] = {
        name: Outer(torch.randn(B, 70, 100).double(), right)
        for name, right in {"query": x, "key": x, "value": x, "else": other}.items()
    }
    found = norms_sq_of(terms)
    assert list(found) == list(terms)
    for name, term in terms.items():
        truth = (term.left.mT @ term.right).square().sum((1, 2))  # type: ignore[attr-defined]
        torch.testing.assert_close(found[name], truth)
    assert not torch.allclose(found["query"], found["key"])


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", [(9,), (3, 2)])
def test_embedding_sums_over_positions_and_honours_padding(
    padding: int | None, shape: tuple[int, ...]
) -> None:
    layer = nn.Embedding(6, 4, padding_idx=padding).double()
    x = torch.randint(0, 6, (B, *shape))
    assert bool((x == 2).any())
    cotangent = torch.randn(B, *shape, 4, dtype=torch.float64)
    rule = find_rule(layer, ["weight"])
    assert rule is not None
    check(rule(layer, x, cotangent)["weight"], own_gradients(layer, x, cotangent)["weight"])


@pytest.mark.parametrize("positions", [2, 40])  # Gram form; formed, measured and dropped
def test_outer_norms_in_both_forms(positions: int) -> None:
    term = Outer(torch.randn(B, positions, 8).double(), torch.randn(B, positions, 6).double())
    check(term, term.left.mT @ term.right)


def test_uses_add_before_the_norm_is_taken() -> None:
    torch.manual_seed(0)
    outer = [Outer(torch.randn(B, t, 6).double(), torch.randn(B, t, 4).double()) for t in (3, 5)]
    lookups = [
        Lookup(torch.randint(0, 6, (B, t)), torch.randn(B, t, 4).double(), 6) for t in (3, 5)
    ]
    dense = Dense(torch.randn(B, 6, 4).double())
    for terms in (
        outer,
        lookups,
        [dense, dense],
        [outer[0], lookups[0]],
        [lookups[1], *outer, lookups[0]],
        [outer[0], lookups[0], dense],
    ):
        check(add(terms), torch.stack([term.instantiate() for term in terms]).sum(0))
    assert isinstance(add([outer[0], lookups[0]]), Tied)
    assert isinstance(add([outer[0], dense]), Sum)
    # The wrong alternative: norms added as if uses were different parameters.
    apart = outer[0].norms_sq() + outer[1].norms_sq()
    assert not torch.allclose(add(outer).norms_sq(), apart, rtol=0.01)


def test_a_rule_is_not_inherited_with_another_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Same(nn.Linear):
        pass

    assert find_rule(Same(4, 3), ["weight"]) is not None
    assert find_rule(Doubled(4, 3), ["weight"]) is None
    patched = nn.Linear(4, 3)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert find_rule(patched, ["weight"]) is None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
        nn.Embedding(4, 3, scale_grad_by_freq=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        nn.LSTM(4, 3),
    ],
)
def test_no_rule_where_the_closed_form_would_be_wrong(layer: nn.Module) -> None:
    assert find_rule(layer, [n for n, _ in layer.named_parameters()]) is None
