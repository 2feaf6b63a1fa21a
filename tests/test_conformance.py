"""What every method and engine must pass, one table row each.

1 equality with the definition; 2 neighbours; 3 zero halves woken first; 4 the closed-form number
of trained parameters; 5 save, new process, plain PEFT, equal logits; 6 a step without noise and
clipping is the plain optimizer's step on the mean over the expected batch size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from tests import oracle, tiny

METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # row of the table -> method, options
    "lora": ("lora", {}),
    "dora": ("dora", {}),
    "ffa_lora": ("ffa_lora", {}),
    "adapter": ("adapter", {}),
    "compacter": ("compacter", {}),
    "compacter-not-shared": ("compacter", {"shared": False}),
    "rgp": ("rgp", {}),
    "rgp-joint": ("rgp", {"clip": "joint"}),
    "rgp-left": ("rgp", {"sides": "left"}),
    "rgp-right": ("rgp", {"sides": "right"}),
    "bitfit": ("bitfit", {}),
    "head": ("head", {}),
    "full": ("full", {}),
}
MODELS = ("bert", "roberta", "distilbert", "gpt2", "gpt2-classify", "llama", "t5")

# What a method cannot do, whatever the engine: (method, model) -> part of the message.
IMPOSSIBLE = {
    ("head", "gpt2"): "has none",
    ("head", "llama"): "has none",
    ("head", "t5"): "has none",
}
# Where Opacus's hooks are refused, and why.
OPACUS_REFUSED = {
    **{("dora", model): "its hooks fail" for model in MODELS},  # DoRA reads its factors directly
    **{
        ("full", model): "shape (1, "  # positions looked up once for all rows
        for model in ("bert", "distilbert", "gpt2", "gpt2-classify")
    },
    ("full", "t5"): "relative_attention_bias",
}
# Without biases bitfit trains the norms (tests/test_wrapping.py): ln_tuning, another method.
NO_BIASES = {("bitfit", "llama"), ("bitfit", "t5")}
# Rows whose code others share: left out of the quick tests.
VARIANTS = ("dora", "ffa_lora", "compacter-not-shared", "rgp-joint", "rgp-left", "rgp-right")
PAIRS = [
    pytest.param(me, mo, marks=[pytest.mark.thorough] if me in VARIANTS else [])
    for me in METHODS
    for mo in MODELS
    if (me, mo) not in IMPOSSIBLE.keys() | NO_BIASES
]

D, HEADS, INNER, LAYERS = tiny.WIDTH, tiny.HEADS, tiny.INNER, tiny.LAYERS
HEAD = {  # parameters of a 3-class head
    "bert": 3 * D + 3,  # the pooler comes with the checkpoint
    "roberta": D * D + D + 3 * D + 3,
    "distilbert": D * D + D + 3 * D + 3,
    "gpt2-classify": 3 * D,
    "gpt2": 0,
    "llama": 0,
    "t5": 0,
}


def made(method: str, model: str) -> torch.nn.Module:
    """A wrapped tiny model with every trained tensor off its start value."""
    name, options = METHODS[method]
    return tiny.wake(dppeft.wrap(tiny.build(model), method=name, **options)).train()


def batch_and_rows(model: str, **options):  # type: ignore[no-untyped-def]
    batch = tiny.make_batch(model, **options)
    return batch, [tiny.row(batch, i) for i in range(len(batch["labels"]))]


def without(batch: dict, index: int) -> dict:
    keep = [i for i in range(len(batch["labels"])) if i != index]
    return {key: value[keep] for key, value in batch.items()}


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_per_example_gradients_and_sums_equal_the_definition(method: str, model: str) -> None:
    wrapped = made(method, model)
    batch, rows = batch_and_rows(model)
    truth = oracle.per_example(wrapped, rows)
    assert oracle.worst_error(dppeft.per_example_grads(wrapped, batch), truth) < 1e-3
    median = float(oracle.norms(truth).median())
    loss = default_loss(wrapped)
    for clipping, definition in (
        ("flat", oracle.clipped_sum),
        ("per_layer", oracle.clipped_sum_per_tensor),
        ("automatic", oracle.normalised_sum),
    ):
        engine = make_engine(wrapped, loss=loss, clipping=clipping)
        found = engine.clipped_sum(batch, max_grad_norm=median)
        assert oracle.worst_error(found.grads, definition(truth, median)) < 1e-3, clipping
        torch.testing.assert_close(found.norms, oracle.norms(truth).float(), rtol=1e-3, atol=1e-6)
        assert found.l2_bound == median


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_B11_opacus_engine_gives_the_same_numbers_or_refuses(method: str, model: str) -> None:
    wrapped = made(method, model)
    batch, _ = batch_and_rows(model)
    reason = OPACUS_REFUSED.get((method, model))
    if reason is not None:
        with pytest.raises(dppeft.UnsupportedModelError, match="engine='opacus'") as error:
            dppeft.per_example_grads(wrapped, batch, engine="opacus")
        assert reason in str(error.value)
        return
    loss = default_loss(wrapped)
    ours = make_engine(wrapped, loss=loss)
    theirs = make_engine(wrapped, loss=loss, engine="opacus")
    for bound in (1e-3, 0.1, 10.0):
        first = ours.clipped_sum(batch, max_grad_norm=bound)
        again = ours.clipped_sum(batch, max_grad_norm=bound)
        other = theirs.clipped_sum(batch, max_grad_norm=bound)
        assert oracle.distance(first.grads, again.grads) == 0
        assert oracle.distance(first.grads, other.grads) < 1e-5 * bound
        torch.testing.assert_close(first.norms, other.norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_removing_one_example_moves_the_sum_by_at_most_the_bound(method: str, model: str) -> None:
    wrapped = made(method, model)
    ragged, rows = batch_and_rows(model)
    median = float(oracle.norms(oracle.per_example(wrapped, rows)).median())
    one = tiny.make_batch(model, batch_size=1, lengths=[4])
    # Aligned rows are the worst case: their gradients add up without cancelling.
    aligned = {key: value.repeat(4, *[1] * (value.dim() - 1)) for key, value in one.items()}
    engine = make_engine(wrapped, loss=default_loss(wrapped))
    for batch in (ragged, aligned):
        for multiple in (1e-3, 1.0, 2.0, 10.0):
            bound = median * multiple
            whole = engine.clipped_sum(batch, max_grad_norm=bound)
            rest = engine.clipped_sum(without(batch, 1), max_grad_norm=bound)
            assert oracle.distance(whole.grads, rest.grads) <= whole.l2_bound * (1 + 1e-4)


def lora_count(model: str, *, factors: int = 2, magnitude: bool = False) -> int:
    """r = 8 on query and value: r (d_in + d_out) for each, plus d_out for DoRA's magnitude."""
    r, kv = 8, D // HEADS  # Llama's one key-value head
    shapes = {
        "gpt2": [(D, 3 * D)],
        "gpt2-classify": [(D, 3 * D)],
        "llama": [(D, D), (D, kv)],
        "t5": [(D, D)] * 6,  # encoder, decoder, cross attention
    }.get(model, [(D, D), (D, D)])
    per_layer = sum(
        (r * i if factors == 2 else 0) + r * o + (o if magnitude else 0) for i, o in shapes
    )
    return LAYERS * per_layer + HEAD[model]


def bottlenecks(model: str) -> int:
    """Behind each attention and feed-forward part; T5's decoder has two attentions."""
    return LAYERS * (5 if model == "t5" else 2)


def bottleneck_count(model: str, width: int) -> int:
    """D and U of each, d x k without biases."""
    return bottlenecks(model) * D * width + HEAD[model]


def compacter_count(model: str, n: int = 8, k: int = 96) -> int:
    """For each of two matrices s, (n, d / n), and t, (n, k / n); and one set of A_i, n^3."""
    return bottlenecks(model) * 2 * (D + k) + n**3


def rgp_count(model: str, r: int = 8) -> int:
    """r (p + d) for each matrix of the blocks."""
    kv = D // HEADS
    square, wide = (D, D), (D, INNER)
    matrices = {
        "gpt2": [(D, 3 * D), square, (D, 4 * D), (4 * D, D)],
        "gpt2-classify": [(D, 3 * D), square, (D, 4 * D), (4 * D, D)],
        "llama": [square, (D, kv), (D, kv), square, wide, wide, wide],
        "t5": [square] * 12 + [wide] * 4,
    }.get(model, [square] * 4 + [wide] * 2)
    return LAYERS * sum(r * (p + d) for p, d in matrices) + HEAD[model]


@pytest.mark.parametrize("model", MODELS)
def test_number_of_trained_parameters(model: str) -> None:
    def count(method: str) -> int:
        wrapped = dppeft.wrap(tiny.build(model), method=method)
        return sum(p.numel() for p in wrapped.parameters() if p.requires_grad)

    assert count("lora") == lora_count(model)
    assert count("ffa_lora") == lora_count(model, factors=1)
    assert count("dora") == lora_count(model, magnitude=True)
    assert count("adapter") == bottleneck_count(model, 2 * 48)
    assert count("compacter") == bottleneck_count(model, 0) + compacter_count(model)
    assert count("rgp") == rgp_count(model)
    assert count("full") == sum(p.numel() for p in tiny.build(model).parameters())
    if ("head", model) not in IMPOSSIBLE:
        assert count("head") == HEAD[model]


@pytest.mark.parametrize(("method", "model"), sorted(IMPOSSIBLE))
def test_what_cannot_train_is_refused(method: str, model: str) -> None:
    with pytest.raises(dppeft.DppeftError, match=IMPOSSIBLE[method, model]):
        dppeft.wrap(tiny.build(model), method=method)


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_a_step_without_noise_and_clipping_is_a_plain_step(
    method: str, model: str, tmp_path: Path
) -> None:
    wrapped = made(method, model)
    _, rows = batch_and_rows(model)
    truth = oracle.per_example(wrapped, rows)
    params = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    if method.startswith("rgp"):  # moves full matrices: tests/tuners/test_rgp.py
        params = {n: p for n, p in params.items() if ".rgp_" not in n}
    # The divisor is the expected batch size, and every row is drawn: their mean.
    expected = {n: p.detach().double() - 0.1 * truth[n].sum(0) / 4 for n, p in params.items()}
    plan = dppeft.plan(
        num_examples=4,
        batch_size=4,
        steps=1,
        delta=1e-3,
        noise_multiplier=0.0,
        max_grad_norm=1e9,
    )
    dataset = [{key: value[0] for key, value in row.items()} for row in rows]
    private = dppeft.make_private(
        wrapped,
        torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1),
        dataset,
        plan,
        collate_fn=partial(as_one_batch, padding=wrapped.config.pad_token_id),
        precision="float32",
        ledger=tmp_path / "ledger.jsonl",
    )
    for batch in private.batches():
        private.step(batch)
    for name, p in params.items():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-5)


def as_one_batch(rows: list[dict], *, padding: int) -> dict:
    """Ragged rows of tensors, padded on the right."""
    fill = {"input_ids": padding, "attention_mask": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence([r[key] for r in rows], True, fill[key])
        if rows[0][key].dim()
        else torch.stack([r[key] for r in rows])
        for key in rows[0]
    }
