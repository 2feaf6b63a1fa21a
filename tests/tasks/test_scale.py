"""The simulated scale of Anil et al. (2021): reference values, directions, the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dppeft.errors import ArgumentError
from tasks import scale
from tasks.scale import BATCH_SIZES, Setting, lines

# Reference noise multipliers at N = 346e6, T = 20,000, epsilon 5.36, delta 1/N, by PLD.
REFERENCE = dict(zip(BATCH_SIZES, (0.466, 0.495, 0.531, 0.580, 0.655, 0.802, 1.178), strict=True))


@pytest.fixture(scope="module")
def made():
    with pytest.warns(match="not below 1 / num_examples"):
        return lines(Setting(), BATCH_SIZES)


def test_the_reference_values_are_reproduced(made):
    for one in made[:-1]:
        assert one.noise_multiplier == pytest.approx(REFERENCE[one.batch_size], rel=0.01)
        # ... and are not so flat that a neighbour's would do.
        others = [value for size, value in REFERENCE.items() if size != one.batch_size]
        assert all(abs(one.noise_multiplier / other - 1) > 0.05 for other in others)
        assert one.epsilon <= 5.36


def test_the_noise_on_the_mean_falls_25_times_over_64_times_the_batch(made):
    noises = [one.noise_per_example for one in made[:-1]]
    assert noises == sorted(noises, reverse=True)
    assert noises[0] / noises[-1] == pytest.approx(25, rel=0.05)


def test_the_growing_schedule_visits_fewer_examples(made):
    fixed = next(one for one in made[:-1] if one.batch_size == made[-1].batch_size)
    grown = made[-1]
    assert grown.examples == 7_500 * 262_144 + 7_500 * 524_288 + 5_000 * 1_048_576
    assert grown.examples < 0.6 * fixed.examples
    assert grown.noise_multiplier < fixed.noise_multiplier
    assert grown.accelerator_hours < fixed.accelerator_hours


def test_hours_by_hand():
    setting = Setting(parameters=100, tokens=10, flops=1000, utilisation=0.5)
    assert setting.hours(300) == pytest.approx(6 * 100 * 10 * 300 / 500 / 3600)


@pytest.mark.parametrize("name", ["num_examples", "parameters", "tokens", "flops", "utilisation"])
def test_numbers_that_cannot_be_are_refused(name):
    with pytest.raises(ArgumentError, match=f"Expected {name} > 0, got {name}=0"):
        Setting(**{name: 0})
    with pytest.raises(ArgumentError, match="utilisation <= 1, got 1.5"):
        Setting(utilisation=1.5)


SMALL = ["--num-examples", "100000", "--steps", "20", "--accountant", "rdp", "--delta", "1e-6"]


def test_the_command_prints_a_table_or_json(monkeypatch):
    monkeypatch.setattr(scale, "GROWING_FROM", 250)
    monkeypatch.setattr(scale, "GROWING_TO", 1000)
    monkeypatch.setattr(scale, "GROWING_EVERY", 5)
    command = [*SMALL, "--batch-size", "1000"]
    done = CliRunner().invoke(scale.app, command)
    assert done.exit_code == 0, done.output
    assert "sigma / B" in done.output
    assert "fewer" in done.output
    read = json.loads(CliRunner().invoke(scale.app, [*command, "--json"]).output)
    assert [one["batch_size"] for one in read] == [1000, 1000]
    assert read[0]["examples"] == 20_000
    assert read[0]["epsilon"] <= 5.36


def test_wrong_use_ends_with_one_line():
    done = CliRunner().invoke(scale.app, [*SMALL, "--batch-size", "200000"])
    assert done.exit_code == 2
    assert "num_examples=100000" in done.output
