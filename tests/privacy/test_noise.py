"""Noise: its scale and independence by statistics, and where its randomness comes from."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from dppeft._types import ClippedSum
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.privacy.noise import GaussianNoise, Secret, fresh_secret

COORDINATES = 40_000


def zeros(l2_bound=1.0, **shapes):
    shapes = shapes or {"weight": (COORDINATES,)}
    grads = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return ClippedSum(grads=grads, norms=torch.zeros(0), l2_bound=l2_bound, count=0)


def has_std(values: torch.Tensor, std: float) -> bool:
    """Chi-square test of the variance and a test of normality, 1 % each."""
    scaled = values.double().numpy().ravel() / std
    low, high = stats.chi2.ppf([0.005, 0.995], len(scaled))
    return low < np.sum(scaled**2) < high and stats.kstest(scaled, "norm").pvalue > 0.01


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("bound", [0.1, 1.0, 10.0])
def test_B16_std_is_noise_multiplier_times_bound(multiplier, bound):
    noise = GaussianNoise(fresh_secret(7))
    drawn = noise.add(zeros(bound), noise_multiplier=multiplier, step=0)["weight"]
    assert has_std(drawn, multiplier * bound)
    for wrong in (math.sqrt(2), 1 / math.sqrt(2), bound, 1 / 8, 1 / 64):
        if wrong != 1:
            assert not has_std(drawn, multiplier * bound * wrong), wrong


def test_B16_the_mean_over_the_expected_batch_has_the_std_that_the_plan_states():
    drawn = GaussianNoise(fresh_secret(1)).add(zeros(0.1), noise_multiplier=2.0, step=0)["weight"]
    for expected_batch in (8, 64):
        assert has_std(drawn / expected_batch, 2.0 * 0.1 / expected_batch)


def test_A17_per_layer_thresholds_give_the_std_of_their_joint_bound():
    """Eight layers clipped to 1 each move the sum by sqrt(8): that bound alone sets the scale."""
    drawn = GaussianNoise(fresh_secret(2)).add(zeros(math.sqrt(8)), noise_multiplier=1.0, step=0)
    assert has_std(drawn["weight"], 2.828427)
    assert not has_std(drawn["weight"], 1.0)


def test_the_sum_itself_comes_through_and_is_not_touched():
    clipped = zeros(1e-6, a=(3, 2), b=(4,))
    for grad in clipped.grads.values():
        grad += 5.0
    noisy = GaussianNoise(fresh_secret(0)).add(clipped, noise_multiplier=1.0, step=0)
    assert list(noisy) == ["a", "b"]
    for name, grad in clipped.grads.items():
        assert torch.all(grad == 5.0)
        torch.testing.assert_close(noisy[name], grad, atol=1e-4, rtol=0)
        assert not torch.equal(noisy[name], grad)


def test_no_noise_gives_a_copy_of_the_sum():
    clipped = zeros(math.inf, a=(3,))
    noisy = GaussianNoise(fresh_secret(0)).add(clipped, noise_multiplier=0.0, step=0)
    assert torch.equal(noisy["a"], clipped.grads["a"])
    noisy["a"] += 1
    assert torch.all(clipped.grads["a"] == 0)


def test_B15_noise_is_float32_whatever_the_sum_is():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        grads = {"w": torch.zeros(20_000, dtype=dtype)}
        clipped = ClippedSum(grads=grads, norms=torch.zeros(0), l2_bound=1.0, count=0)
        noisy = GaussianNoise(fresh_secret(0)).add(clipped, noise_multiplier=1.0, step=0)["w"]
        assert noisy.dtype == torch.float32
        assert len(noisy.unique()) > 10_000


# ---- independence and sources


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.corrcoef(a.ravel().numpy(), b.ravel().numpy())[0, 1])


def test_H2_tensors_of_one_shape_get_different_noise():
    clipped = zeros(a=(100, 200), b=(100, 200))
    noisy = GaussianNoise(fresh_secret(0)).add(clipped, noise_multiplier=1.0, step=0)
    assert abs(correlation(noisy["a"], noisy["b"])) < 0.03


def test_H2_steps_and_runs_get_different_noise():
    secret = fresh_secret()
    noise = GaussianNoise(secret)
    draws = [noise.add(zeros(), noise_multiplier=1.0, step=step)["weight"] for step in range(3)]
    draws.append(GaussianNoise(fresh_secret()).add(zeros(), noise_multiplier=1.0, step=0)["weight"])
    for i in range(4):
        for j in range(i):
            assert abs(correlation(draws[i], draws[j])) < 0.03


def test_H2_noise_is_a_function_of_secret_and_step_only():
    secret = fresh_secret()
    first = GaussianNoise(secret).add(zeros(), noise_multiplier=1.0, step=5)["weight"]
    later = GaussianNoise(secret)
    later.add(zeros(), noise_multiplier=1.0, step=4)
    assert torch.equal(later.add(zeros(), noise_multiplier=1.0, step=5)["weight"], first)
    # The order in which a model lists its tensors does not matter.
    there = GaussianNoise(secret).add(zeros(a=(3,), b=(3,)), noise_multiplier=1.0, step=0)
    back = GaussianNoise(secret).add(zeros(b=(3,), a=(3,)), noise_multiplier=1.0, step=0)
    assert all(torch.equal(there[name], back[name]) for name in "ab")


def test_H2_torchs_global_generator_neither_matters_nor_moves():
    noise = GaussianNoise(fresh_secret())
    draws = []
    for step in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        before = torch.get_rng_state()
        draws.append(noise.add(zeros(), noise_multiplier=1.0, step=step)["weight"])
        assert torch.equal(torch.get_rng_state(), before)
    assert abs(correlation(*draws)) < 0.03, "a user's manual_seed must not freeze the noise"
    torch.manual_seed(0)
    assert not torch.equal(torch.randn(COORDINATES), draws[0])


def test_H2_the_whole_key_matters_on_the_cpu():
    """Torch's CPU generator keeps 32 bits of a seed; the noise must not depend on so few."""
    torch_generator = torch.Generator()
    same = [torch.randn(4, generator=torch_generator.manual_seed(s)) for s in (5, 5 + 2**32)]
    assert torch.equal(*same), "torch uses the whole seed now: the note in noise.py is out of date"
    keys = [bytes(32), bytes(31) + b"\1", b"\1" + bytes(31), bytes(15) + b"\1" + bytes(16)]
    draws = [
        GaussianNoise(Secret(key, seeded=False)).add(zeros(), noise_multiplier=1.0, step=0)
        for key in keys
    ]
    for i in range(len(keys)):
        for j in range(i):
            assert abs(correlation(draws[i]["weight"], draws[j]["weight"])) < 0.03


def test_noise_and_sampling_streams_are_independent():
    secret = fresh_secret(0)
    integers = {secret.integer(0), secret.integer(0, 1), secret.integer(1)}
    integers |= {secret.spawn(name).integer(0) for name in ("sampling", "noise")}
    assert len(integers) == 5
    for number in integers:  # no pattern inside the 256 bits either
        data = number.to_bytes(32, "big")
        assert len({data[i : i + 4] for i in range(0, 32, 4)}) == 8


@pytest.mark.gpu
def test_noise_on_an_accelerator_has_the_same_scale():
    grads = {name: torch.zeros(COORDINATES, device="cuda") for name in ("a", "b")}
    clipped = ClippedSum(grads=grads, norms=torch.zeros(0), l2_bound=0.5, count=0)
    state = torch.cuda.get_rng_state()
    noisy = GaussianNoise(fresh_secret(0)).add(clipped, noise_multiplier=2.0, step=0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert noisy["a"].device.type == "cuda"
    assert has_std(noisy["a"].cpu(), 1.0)
    assert abs(correlation(noisy["a"].cpu(), noisy["b"].cpu())) < 0.03


# ---- refusals


@pytest.mark.parametrize("bound", [math.inf, math.nan])
def test_B18_noise_without_a_bound_is_refused(bound):
    with pytest.raises(ArgumentError, match="finite l2_bound with noise, got l2_bound="):
        GaussianNoise(fresh_secret(0)).add(zeros(bound), noise_multiplier=1.0, step=0)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_a_wrong_noise_multiplier_is_refused(multiplier):
    with pytest.raises(ArgumentError, match="noise_multiplier >= 0, got noise_multiplier="):
        GaussianNoise(fresh_secret(0)).add(zeros(), noise_multiplier=multiplier, step=0)


# ---- the secret


def test_H2_a_secret_comes_from_the_system_unless_it_is_marked_as_seeded():
    assert fresh_secret().to_bytes() != fresh_secret().to_bytes()
    assert not fresh_secret().seeded
    assert fresh_secret(42).to_bytes() == fresh_secret(42).to_bytes()
    assert fresh_secret(42).to_bytes() != fresh_secret(43).to_bytes()
    assert fresh_secret(42).seeded
    assert fresh_secret(42).spawn("noise").seeded
    for wrong in ("42", 1.0, True):
        with pytest.raises(ArgumentTypeError, match="seed="):
            fresh_secret(wrong)


def test_H2_a_secret_reaches_no_log_and_no_pickle():
    secret = fresh_secret()
    key = secret.to_bytes()[1:]
    for text in (repr(secret), str(secret), repr([secret])):
        assert key.hex() not in text
        assert repr(key) not in text
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
    assert copy.deepcopy({"secret": secret})["secret"] is secret


def test_a_secret_travels_between_ranks():
    for secret in (fresh_secret(), fresh_secret(1)):
        there = Secret.from_bytes(secret.to_bytes())
        assert there.seeded == secret.seeded
        assert there.integer(3) == secret.integer(3)
    with pytest.raises(ArgumentTypeError, match="32 bytes"):
        Secret(b"short", seeded=False)
