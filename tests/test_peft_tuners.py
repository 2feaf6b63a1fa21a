"""Every tuner that PEFT has, on four kinds of model: exact, or refused by name. None is wrong.

The list is PEFT's registry: a tuner that a later PEFT adds is tested without a line here, and the
README's table must then be made again.
"""

from __future__ import annotations

import pytest
import torch

import dppeft
from tests import oracle, tiny
from tests.tuners.outcomes import EXACT, MODELS, OPTIONS, README, REFUSED, TUNERS, cell, outcome

# The only tuners that may be refused where PEFT itself can run them, and why.
REASONS = {
    "adalora": "a loss term of its own",
    "cpt": "a loss term of its own",
    "shadow": "a loss term of its own",
    "lily": "changes with the other examples",
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("tuner", TUNERS)
def test_exact_or_refused_as_the_readme_says(tuner: str, model_name: str) -> None:
    word, why = outcome(tuner, model_name)
    assert word == cell(README.read_text(), tuner, model_name), why
    assert word != "WRONG", why
    if word == REFUSED:
        assert REASONS[tuner] in why


def test_most_of_what_peft_has_is_exact_somewhere() -> None:
    text = README.read_text()
    exact = {t for t in TUNERS if any(cell(text, t, m) == EXACT for m in MODELS)}
    assert len(exact) >= 37, sorted(set(TUNERS) - exact)


@pytest.mark.parametrize("tuner", ["lora", "pvera", "vblora"])
def test_a_batch_without_padding_first_does_not_hide_the_mask(tuner: str) -> None:
    """Without padding transformers passes no mask, so the layout seen then lacks its batch axis."""
    from dppeft.clipping.engine import make_engine
    from dppeft.loss import default_loss

    model = dppeft.wrap(tiny.build("roberta"), tuner, **OPTIONS.get(tuner, {}))
    tiny.wake(model, std=0.02).train()
    engine = make_engine(model, loss=default_loss(model))
    for lengths in ((5, 5, 5), (6, 2, 4), (3, 3), (7, 7, 7, 2), (4,)):
        batch = tiny.make_batch("roberta", lengths=lengths)
        rows = [tiny.row(batch, i) for i in range(len(lengths))]
        found = engine.per_example_grads(batch)
        assert oracle.worst_error(found, oracle.per_example(model, rows)) < 1e-4


def test_pvera_draws_anew_for_each_update() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "pvera")).train()
    batch = tiny.make_batch("bert")
    layers = [m for m in model.modules() if isinstance(getattr(m, "update", None), int)]
    assert layers
    before = dppeft.per_example_grads(model, batch)
    for layer in layers:
        layer.update += 1
    after = dppeft.per_example_grads(model, batch)
    assert oracle.worst_error(before, {n: g.double() for n, g in after.items()}) > 1e-2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"r": 2}, {"r": 2, "module_dropout": 0.5}])
@pytest.mark.parametrize("tuner", ["loha", "lokr"])
def test_a_repaired_tuner_computes_what_pefts_does(tuner: str, options: dict[str, float]) -> None:
    """In training mode, with both forms of LoHa (r^2 below and above the layer's sides)."""
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), tuner, **options)).train()
    batch = tiny.make_batch("bert")
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = model(**batch).logits
    layers = [m for m in model.modules() if type(m).__module__ == "dppeft.tuners.repairs"]
    assert layers
    for layer in layers:
        layer.__class__ = type(layer).__mro__[2]  # PEFT's own
        assert layer.__class__.__module__.startswith("peft.")
    torch.manual_seed(3)
    torch.testing.assert_close(ours, model(**batch).logits, rtol=1e-5, atol=1e-6)
    torch.set_rng_state(state)
