"""The carriers of one matrix: projection, norms, noise, decomposition. Plain tensors only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dppeft.tuners.carriers import Carriers, orthonormal
from tests.chi_square import chi_square_rejects

P, DIM, R = 9, 7, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(
    rank: int = R, *, sides: str = "both", clip: str = "tangent", shape: tuple[int, int] = (P, DIM)
) -> Carriers:
    carriers = Carriers(shape, rank=rank, sides=sides, clip=clip, geometry=None).double()
    history = torch.randn(shape, dtype=torch.float64, generator=generator(1))
    carriers.rebuild(history, power_iters=2, generator=generator())
    return carriers


def coordinates(carriers: Carriers, gradient: Tensor) -> dict[str, Tensor]:
    """Of a full gradient, by the paper's definition."""
    left, right = carriers.basis_left, carriers.basis_right
    return {"left": gradient @ right.T, "right": left.T @ gradient}


def test_at_full_rank_the_rebuilt_update_is_the_gradient() -> None:
    gradient = torch.randn(P, DIM, dtype=torch.float64)
    carriers = made(rank=DIM)
    torch.testing.assert_close(carriers.lift(coordinates(carriers, gradient)), gradient)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_at_rank_r_it_is_the_projection_to_the_tangent_space(rank: int) -> None:
    gradient = torch.randn(P, DIM, dtype=torch.float64)
    carriers = made(rank)
    left, right = carriers.basis_left, carriers.basis_right
    beside = torch.eye(P) - left @ left.T, torch.eye(DIM) - right.T @ right
    expected = gradient - beside[0] @ gradient @ beside[1]
    torch.testing.assert_close(carriers.lift(coordinates(carriers, gradient)), expected)
    # The sign before the overlap is a minus: with the plus of the released code it is not.
    overlap = left @ left.T @ (gradient @ right.T) @ right
    assert not torch.allclose(expected + 2 * overlap, expected)


@pytest.mark.parametrize("clip", ["tangent", "joint"])
def test_example_gradients_are_the_carriers_of_each_examples_gradient(clip: str) -> None:
    carriers = made(clip=clip)
    a, b = torch.randn(4, 6, DIM).double(), torch.randn(4, 6, P).double()
    found = carriers.example_gradients(a, b)
    for i in range(4):
        gradient = b[i].T @ a[i]
        expected = coordinates(carriers, gradient)
        if clip == "tangent":
            left = carriers.basis_left
            expected["left"] -= left @ left.T @ expected["left"]
        for name in expected:
            torch.testing.assert_close(found[name][i], expected[name])


def test_the_tangent_norm_is_the_updates_and_the_joint_norm_is_never_less() -> None:
    a, b = torch.randn(64, 5, DIM).double(), torch.randn(64, 5, P).double()
    norms = {}
    for clip in ("tangent", "joint"):
        carriers = made(clip=clip)
        found = carriers.example_gradients(a, b)
        norms[clip] = sum(found[name].flatten(1).square().sum(1) for name in found).sqrt()
        if clip == "tangent":
            updates = [carriers.lift({n: g[i] for n, g in found.items()}) for i in range(64)]
            torch.testing.assert_close(norms[clip], torch.stack([u.norm() for u in updates]))
    ratio = norms["joint"] / norms["tangent"]
    assert float(ratio.min()) >= 1 - 1e-12
    assert float(ratio.max()) <= 2**0.5 + 1e-12
    assert float(ratio.max()) > 1.05


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_side_alone(side: str) -> None:
    carriers = made(sides=side)
    gradient = torch.randn(P, DIM, dtype=torch.float64)
    part = {side: coordinates(carriers, gradient)[side]}
    left, right = carriers.basis_left, carriers.basis_right
    expected = gradient @ right.T @ right if side == "left" else left @ left.T @ gradient
    torch.testing.assert_close(carriers.lift(part), expected)
    found = carriers.example_gradients(gradient.T.new_ones(1, 1, DIM), gradient.new_ones(1, 1, P))
    assert list(found) == [side]


@pytest.mark.parametrize("clip", ["tangent", "joint"])
def test_noise_of_the_rebuilt_update_has_its_energy_and_no_other(clip: str) -> None:
    """``sigma^2 C^2 r (p + d - r)``, chi-square with r (p + d - r) degrees; 1.4 is rejected."""
    std, draws = 0.7, 400
    carriers = made(clip=clip)
    degrees = R * (P + DIM - R)
    torch.manual_seed(0)
    energy = 0.0
    for _ in range(draws):
        noise = {
            "left": std * torch.randn(P, R).double(),
            "right": std * torch.randn(R, DIM).double(),
        }
        energy += float(carriers.lift(noise).square().sum())
    assert not chi_square_rejects(energy / std**2, degrees * draws)
    assert chi_square_rejects(energy / (1.4 * std) ** 2, degrees * draws)
    # The released language code's plus sign has more.
    overlap = R * R * 8  # the block gets weight 3 instead of 1
    assert chi_square_rejects((energy / std**2) + overlap * draws, degrees * draws)


def test_that_noise_is_the_same_in_every_direction_of_the_tangent_space() -> None:
    carriers = made()
    torch.manual_seed(0)
    directions = [
        carriers.lift(coordinates(carriers, torch.randn(P, DIM).double())) for _ in range(8)
    ]
    directions = [d / d.norm() for d in directions]
    variances = torch.zeros(8, dtype=torch.float64)
    draws = 2000
    for _ in range(draws):
        noise = {"left": torch.randn(P, R).double(), "right": torch.randn(R, DIM).double()}
        lifted = carriers.lift(noise)
        variances += torch.stack([(lifted * d).sum().square() for d in directions])
    for variance in (variances).tolist():
        assert not chi_square_rejects(variance, draws)
        assert chi_square_rejects(variance * 1.4, draws)


@pytest.mark.parametrize("true_rank", [0, 1, 2, 3, 7])
def test_carriers_are_orthonormal_whatever_the_rank_of_the_history(true_rank: int) -> None:
    factors = torch.randn(P, true_rank), torch.randn(true_rank, DIM)
    history = factors[0] @ factors[1] * 1e-4
    carriers = Carriers((P, DIM), rank=R, sides="both", clip="tangent", geometry=None)
    for warm in (False, True):
        carriers.rebuild(history, power_iters=1, generator=generator(), warm=warm)
        left, right = carriers.basis_left, carriers.basis_right
        torch.testing.assert_close(left.T @ left, torch.eye(R), atol=2e-6, rtol=0)
        torch.testing.assert_close(right @ right.T, torch.eye(R), atol=2e-6, rtol=0)
        if true_rank <= R:  # all of the history is in the span
            kept = left @ left.T @ history @ right.T @ right
            torch.testing.assert_close(kept, history, atol=1e-9, rtol=1e-3)


def test_power_iteration_finds_the_leading_directions() -> None:
    u, _ = torch.linalg.qr(torch.randn(P, DIM))
    v, _ = torch.linalg.qr(torch.randn(DIM, DIM))
    history = u @ torch.diag(torch.tensor([9.0, 8, 7, 0.1, 0.1, 0.1, 0.1])) @ v.T
    carriers = Carriers((P, DIM), rank=R, sides="both", clip="tangent", geometry=None)
    carriers.rebuild(history, power_iters=3, generator=generator())
    shares = torch.linalg.svdvals(carriers.basis_left.T @ u[:, :R])
    assert float(shares.min()) > 0.999


def test_orthonormal_fills_up_only_what_is_missing() -> None:
    first = torch.randn(P, 1)
    matrix = torch.cat([first, 2 * first, torch.randn(P, 1)], dim=1)
    found = orthonormal(matrix, generator())
    torch.testing.assert_close(found.T @ found, torch.eye(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(found @ found.T @ matrix, matrix)


@pytest.mark.parametrize("displaced", [False, True])
@pytest.mark.parametrize("clip", ["tangent", "joint"])
def test_fast_backward_is_autograds_of_the_literal_forward(clip: str, displaced: bool) -> None:
    """The literal form: L, R as parameters and the rest of the weight as a constant."""
    carriers = made(clip=clip)
    if displaced:
        for parameter in carriers.parameters():
            parameter.data.normal_(generator=generator(4))
    weight = torch.randn(P, DIM).double()
    x, towards = torch.randn(4, 5, DIM).double().requires_grad_(), torch.randn(4, 5, P).double()
    y = carriers(x, x @ weight.T)
    found = torch.autograd.grad((y * towards).sum(), [carriers.left, carriers.right, x])
    own = [
        parameter.detach().clone().requires_grad_() for parameter in (carriers.left, carriers.right)
    ]
    basis = carriers.basis_left
    left = own[0] - basis @ (basis.T @ own[0]) if clip == "tangent" else own[0]
    literal = weight + left @ carriers.basis_right + basis @ own[1]
    z = x @ literal.T
    torch.testing.assert_close(y, z)
    expected = torch.autograd.grad((z * towards).sum(), [*own, x])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_reparametrised_literally_as_the_paper_does_the_gradients_are_the_carriers() -> None:
    """W = L R + (W - L R) with L and R trained: dL = G R^T, dR = L^T G (Section 3)."""
    carriers = made(clip="joint")
    left = carriers.basis_left.clone().requires_grad_()
    right = carriers.basis_right.clone().requires_grad_()
    weight = torch.randn(P, DIM).double()
    rest = weight - (left @ right).detach()
    x, towards = torch.randn(1, 5, DIM).double(), torch.randn(1, 5, P).double()
    loss = ((x @ (left @ right + rest).T) * towards).sum()
    expected = torch.autograd.grad(loss, [left, right])
    found = carriers.example_gradients(x, towards)
    torch.testing.assert_close(found["left"][0], expected[0])
    torch.testing.assert_close(found["right"][0], expected[1])
