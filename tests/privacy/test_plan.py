"""The plan: exact arithmetic, one owner for each number, and refusals before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError, PrivacyWarning
from dppeft.privacy.ledger import Ledger, plan_header
from dppeft.privacy.plan import PrivacyPlan

GOOD = {"num_examples": 1000, "batch_size": 100, "epochs": 1, "delta": 1e-5, "epsilon": 3.0}


def make(**changes):
    arguments = {**GOOD, **changes}
    if "noise_multiplier" in changes:
        arguments.pop("epsilon")
    if "steps" in changes:
        arguments.pop("epochs")
    return dppeft.plan(**arguments)


def test_rate_is_exact():
    plan = dppeft.plan(
        num_examples=67349, batch_size=2000, epochs=3, delta=1e-5, noise_multiplier=1.0
    )
    assert plan.sample_rate == 2000 / 67349
    assert plan.expected_batch_size == 2000
    assert plan.rates == (2000 / 67349,) * plan.steps
    assert plan.sample_rate_at(10_000) == plan.sample_rate


def test_A1_epochs_are_not_steps():
    plan = dppeft.plan(
        num_examples=67349, batch_size=2000, epochs=3, delta=1e-5, noise_multiplier=1.0
    )
    assert plan.steps == 102
    assert 2.10 <= plan.epsilon() <= 2.56
    assert plan.epsilon(steps=3) < 0.9
    assert plan.epsilon(steps=112) > plan.epsilon()  # steps past the plan keep adding


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [
        (93, 1, 10, 930),
        (99, 1, 1, 99),
        (67349, 2000, 3, 102),
        (67349, 2000, 3.0, 102),
        (1000, 100, 0.1, 1),
        (1000, 100, 0.3, 3),  # in doubles 0.3 is a little less, 3 * 0.1 a little more
        (100, 1, 0.07, 7),  # in doubles 0.07 * 100 rounds to 7.000000000000001
        (1000, 100, 1.01, 11),
        (10, 10, 5, 5),
        (10, 7, 1, 2),
        (1000, 100, Fraction(1, 3), 4),
        (1000, 100, np.float64(0.5), 5),
        (1000, 100, np.int64(2), 20),
    ],
)
def test_A7_the_epoch_length_is_exact(rows, batch, epochs, steps):
    arguments = {"num_examples": rows, "batch_size": batch, "delta": 1e-5, "noise_multiplier": 1.0}
    assert dppeft.plan(epochs=epochs, **arguments).steps == steps


def test_A7_the_epoch_length_is_exact_for_every_size():
    rng = random.Random(0)
    sizes = [(n, 1) for n in range(1, 260)]
    sizes += [(rows, rng.randint(1, rows)) for rows in rng.sample(range(1, 10**6), 300)]
    for rows, batch in sizes:
        plan = dppeft.plan(
            num_examples=rows, batch_size=batch, epochs=7, delta=1e-9, noise_multiplier=1.0
        )
        assert (plan.steps - 1) * batch < 7 * rows <= plan.steps * batch


@pytest.mark.parametrize("target", [1, 3, 8])
def test_A2_planned_reported_and_ledgers_epsilon_agree_and_stay_within_the_target(tmp_path, target):
    plan = dppeft.plan(num_examples=2000, batch_size=64, epochs=3, delta=1e-5, epsilon=target)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", plan_header(plan, seeded=False))
    for step in range(plan.steps):
        ledger.append(
            step=step,
            sample_rate=plan.sample_rate_at(step),
            noise_multiplier=plan.noise_multiplier,
            l2_bound=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size_at(step),
        )
    spent = ledger.spent()
    assert target - 0.1 <= spent.epsilon <= target
    assert spent.epsilon == plan.epsilon()
    assert spent.steps == plan.steps == 94
    assert plan.epsilon(accountant="rdp") > target  # another accountant is looser, and says so


def test_H4_a_plan_stops_before_the_step_that_would_exceed_its_target():
    plan = dppeft.plan(num_examples=2000, batch_size=64, steps=500, delta=1e-5, epsilon=3)
    spent = [plan.epsilon(steps=step) for step in range(0, 501, 25)]
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert spent[-1] <= plan.target_epsilon == 3
    # The same noise over more steps than planned does exceed it.
    assert plan.epsilon(steps=520) > 3


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_the_accountant_of_the_plan_calibrates_and_reports(accountant):
    plan = make(accountant=accountant)
    assert 2.95 <= plan.epsilon() <= 3.0
    assert plan.accountant == accountant
    assert plan.noise_multiplier == dppeft.noise_multiplier(
        sample_rate=0.1, steps=10, epsilon=3.0, delta=1e-5, accountant=accountant
    )


def test_a_given_noise_has_no_target():
    assert make(noise_multiplier=1.0).target_epsilon is None
    assert make().target_epsilon == 3.0


@pytest.mark.parametrize("how", [{"epsilon": math.inf}, {"noise_multiplier": 0}])
def test_G6_no_noise_is_allowed_and_says_that_it_guarantees_nothing(how):
    plan = make(**how)
    assert plan.noise_multiplier == 0
    assert plan.target_epsilon is None
    assert plan.epsilon() == math.inf
    assert plan.epsilon(steps=0) == 0.0
    assert not plan.has_guarantee
    assert "NO GUARANTEE" in plan.explain()


def test_G6_a_huge_epsilon_works():
    plan = make(epsilon=1000)
    assert 990 <= plan.epsilon() <= 1000
    assert "NO GUARANTEE" not in plan.explain()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "num_examples >= 1, got num_examples=0"),
        ({"batch_size": 0}, "batch_size >= 1, got batch_size=0"),
        ({"batch_size": 2000}, "batch_size <= num_examples=1000, got batch_size=2000"),
        ({"epochs": 0}, "epochs > 0, got epochs=0"),
        ({"epochs": -1}, "epochs > 0, got epochs=-1"),
        ({"epochs": math.inf}, "finite epochs"),
        ({"epochs": math.nan}, "got epochs=nan"),
        ({"epochs": None}, "exactly one of epochs and steps, got epochs=None and steps=None"),
        ({"steps": 0}, "steps >= 1, got steps=0"),
        ({"delta": 0}, "got delta=0"),
        ({"delta": 1}, "got delta=1"),
        ({"delta": -1}, "got delta=-1"),
        ({"delta": math.nan}, "got delta=nan"),
        ({"epsilon": 0}, "epsilon > 0, got epsilon=0"),
        ({"epsilon": -2}, "got epsilon=-2"),
        ({"epsilon": math.nan}, "got epsilon=nan"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": -1}, "noise_multiplier >= 0, got noise_multiplier=-1"),
        ({"noise_multiplier": math.inf}, "got noise_multiplier=inf"),
        ({"max_grad_norm": 0}, "max_grad_norm > 0, got max_grad_norm=0"),
        ({"max_grad_norm": -1}, "got max_grad_norm=-1"),
        ({"max_grad_norm": math.inf}, "finite max_grad_norm with noise"),
        ({"accountant": "gdp"}, "'gdp' is not offered"),
        ({"accountant": "plds"}, "Unknown accountant='plds'.*Did you mean 'pld'"),
    ],
)
def test_G4_a_wrong_value_is_named_with_what_was_expected(changes, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": None}, "num_examples=None to be a whole number"),
        ({"num_examples": 1000.0}, "num_examples=1000.0"),
        ({"batch_size": 64.5}, "batch_size=64.5"),
        ({"delta": "1e-5"}, "delta='1e-5' to be a number"),
        ({"epochs": "3"}, "epochs='3' to be a number"),
        ({"steps": 2.0}, "steps=2.0 to be a whole number"),
        ({"delta": None}, "Expected delta, got none: give delta well below 1 / num_examples"),
    ],
)
def test_G4_a_wrong_type_is_named(changes, message):
    with pytest.raises(ArgumentTypeError, match=message):
        make(**changes)


def test_G4_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(ArgumentError, match="exactly one of epochs and steps, got epochs=1 and st"):
        dppeft.plan(**GOOD, steps=5)
    with pytest.raises(ArgumentError, match="exactly one of epsilon and noise_multiplier, got"):
        dppeft.plan(**GOOD, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="max_grad_nrom"):
        dppeft.plan(**GOOD, max_grad_nrom=1.0)
    with pytest.raises(TypeError, match="positional"):
        dppeft.plan(1000, 100)
    without_delta = {name: value for name, value in GOOD.items() if name != "delta"}
    with pytest.raises(ArgumentTypeError, match="Expected delta"):
        dppeft.plan(**without_delta)


def test_A13_delta_of_one_over_n_or_more_warns():
    with pytest.warns(PrivacyWarning, match="delta=0.001 is not below 1 / num_examples = 0.001"):
        plan = make(delta=1e-3)
    assert "Choose a smaller delta" in plan.explain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(delta=0.99e-3)


def test_no_bound_without_noise_is_allowed():
    plan = make(noise_multiplier=0, max_grad_norm=math.inf)
    assert plan.max_grad_norm == math.inf
    json.dumps(plan.summary(), allow_nan=False)


def test_a_schedule_is_accounted_step_by_step():
    schedule = [50] * 10 + [100] * 20 + [200] * 5
    plan = dppeft.plan(
        num_examples=1000, batch_size=200, delta=1e-5, epsilon=3.0, batch_schedule=schedule
    )
    assert plan.steps == 35
    assert plan.rates == tuple(size / 1000 for size in schedule)
    assert plan.expected_batch_size_at(34) == 200 == plan.expected_batch_size_at(99)
    by_hand = dppeft.epsilon(
        sample_rate=plan.rates, noise_multiplier=plan.noise_multiplier, steps=1, delta=1e-5
    )
    assert plan.epsilon() == by_hand
    assert 2.97 <= by_hand <= 3.0
    assert plan.epsilon(steps=10) == dppeft.epsilon(
        sample_rate=0.05, noise_multiplier=plan.noise_multiplier, steps=10, delta=1e-5
    )
    assert plan.epsilon(steps=40) == dppeft.epsilon(
        sample_rate=[*plan.rates, *[0.2] * 5],
        noise_multiplier=plan.noise_multiplier,
        steps=1,
        delta=1e-5,
    )
    assert plan.epsilon(steps=0) == 0.0
    assert "50 to 200 (schedule)" in plan.explain()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_schedule": []}, "at least one"),
        ({"batch_schedule": [50, 0]}, "batch_schedule=0"),
        ({"batch_schedule": [50, 2000], "batch_size": 1000}, "entry <= num_examples=1000"),
        (
            {"batch_schedule": [50, 60]},
            "batch_size=100 to be the largest entry.*give batch_size=60",
        ),
        ({"batch_schedule": [50, 100], "epochs": 1}, "leave out epochs=1"),
        ({"batch_schedule": [50, 100], "steps": 3}, "leave out epochs=None and steps=3"),
    ],
)
def test_a_schedule_that_contradicts_the_rest_is_refused(changes, message):
    arguments = {**GOOD, "epochs": None, **changes}
    with pytest.raises(ArgumentError, match=message):
        dppeft.plan(**arguments)
    with pytest.raises(ArgumentTypeError, match="one expected batch size per step, got 5"):
        dppeft.plan(**{**GOOD, "epochs": None, "batch_schedule": 5})


def test_the_plan_cannot_be_changed_or_be_made_inconsistent():
    plan = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.noise_multiplier = 0.1
    with pytest.raises(AttributeError):
        plan.sample_rate = 0.5
    with pytest.raises(ArgumentError, match="batch_size <= num_examples"):
        dataclasses.replace(plan, num_examples=10)
    # The rate follows from the sizes; there is no second place to change it.
    assert dataclasses.replace(plan, num_examples=2000).sample_rate == 0.05
    with pytest.raises(ArgumentError, match="got delta=2"):
        PrivacyPlan(num_examples=9, expected_batch_size=3, steps=1, noise_multiplier=1, delta=2)


def test_explain_shows_every_number_a_person_needs():
    plan = dppeft.plan(
        num_examples=67349, batch_size=2000, epochs=3, delta=1e-6, epsilon=8, max_grad_norm=0.1
    )
    table = dict(line.split("  ", 1) for line in plan.explain().splitlines())
    table = {label: value.strip() for label, value in table.items()}
    assert table["rows in the private data set"] == "67,349"
    assert table["unit of privacy"] == "one row, add or remove"
    assert table["steps"] == "102"
    assert table["passes over the data, expected"] == "3.029"
    assert table["delta"] == "1e-06"
    assert float(table["epsilon (pld)"]) == pytest.approx(plan.epsilon(), abs=1e-4)
    assert float(table["epsilon (rdp, looser)"]) > 8
    noise = float(table["noise on the mean gradient"].split()[0])
    assert noise == pytest.approx(plan.noise_multiplier * 0.1 / 2000, rel=1e-3)
    lines = plan.explain().splitlines()
    columns = {line.index(value) for line, value in zip(lines, table.values(), strict=True)}
    assert len(columns) == 1, "values are aligned"


def test_the_summary_is_plain_json_and_complete():
    summary = make().summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    names = {field.name for field in dataclasses.fields(PrivacyPlan)}
    assert names | {"unit", "sampler", "sample_rate"} == summary.keys()
