"""Adam that knows how much of a released gradient is noise.

The noise's standard deviation s = sigma C / B is public, and two things can be done with it for
nothing:

*Bias correction* (DP-AdamBC, Tang et al. 2023, arXiv 2312.14334, Algorithm 1). The square of a
released gradient holds s**2 beside the square of the signal. Where noise prevails Adam's
denominator is about s everywhere, and what remains is momentum SGD. So it is taken off:

    theta <- theta - lr * m^ / sqrt(max(v^ - s**2, floor))

*Scale, then privatise* (compare arXiv 2507.01129). Clipping and isotropic noise suit a gradient
whose coordinates have one size. Adam's second moment, of released gradients, says what sizes they
have: each example's gradient is multiplied by

    scale = sqrt(mean(v) / (v + 1e-3 mean(v))), the mean over all trained coordinates,

before it is clipped, and the noised sum is divided by it. The bound, the noise and the account
are the same; coordinates with small gradients get less noise, those with large ones more.

*Spectral shrinkage*: matrix gradients enter the first moment after ``shrink``. The second moment is
that of the gradient as released: taken of what is left after shrinkage, it would blow that up
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from dppeft import _validate
from dppeft.errors import ArgumentError
from dppeft.optimizers.shrinkage import shrink

__all__ = ["PrivateAdam"]

SECOND_MOMENTS = ("corrected", "plain", "prescaled")


class PrivateAdam(torch.optim.Optimizer):
    """Adam on released gradients whose noise has a known size.

    A private run says before each step how large the noise is. Where it changes, with the batch or
    the threshold, the correction is the same moving average as the second moment itself. Without
    noise and without a floor to speak of it is Adam.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        betas: of the two moving averages, each in [0, 1).
        second_moment: "corrected": the noise's part is taken off; "plain": Adam's own; "prescaled":
            Adam's own, and gradients are clipped and noised in its units.
        floor: least value of the corrected second moment (the paper's gamma'), > 0: a coordinate
            moves by at most ``lr * |m^| / sqrt(floor)``. It must be tuned, below s**2.
        shrinkage: shrink the singular values of matrix gradients.
        eps: added to the denominator where it is not corrected, as in Adam.
        weight_decay: decoupled, as in AdamW.

    Attributes:
        noise_std: standard deviation of each coordinate of the gradient to come; set by the run.

    Raises:
        ArgumentError: a value out of range; ``step`` before ``noise_std`` is set.
    """

    def __init__(  # noqa: PLR0913 - Adam's own, and two options
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        second_moment: str = "corrected",
        floor: float = 1e-8,
        shrinkage: bool = False,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _validate.non_negative(lr=lr)
        _validate.non_negative(weight_decay=weight_decay)
        _validate.non_negative(eps=eps)
        _validate.positive(floor=floor)
        if not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"Expected betas in [0, 1), got betas={betas}.")
        _validate.one_of(SECOND_MOMENTS, second_moment=second_moment)
        if shrinkage and second_moment == "prescaled":
            raise ArgumentError(
                "shrinkage=True takes the noise of a matrix to be of one size, and with "
                "second_moment='prescaled' it is not. Choose one of the two."
            )
        options = {"second_moment": second_moment, "floor": floor, "shrinkage": shrinkage}
        options |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        _ = self.prescaled  # refuses groups that differ
        self.noise_std: float | None = None

    @property
    def prescaled(self) -> bool:
        """Whether gradients are scaled before they are clipped; one answer for all groups.

        Raises:
            ArgumentError: the groups differ.
        """
        kinds = {group["second_moment"] for group in self.param_groups}
        if len(kinds) > 1 or not kinds <= set(SECOND_MOMENTS):
            raise ArgumentError(
                f"The groups have second_moment={sorted(kinds)}; expected one for all of them, of "
                f"{', '.join(SECOND_MOMENTS)}."
            )
        return kinds == {"prescaled"}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every tensor that has a gradient."""
        if self.noise_std is None:
            raise ArgumentError(
                "PrivateAdam does not know the noise in this gradient: a private run says it. In a "
                "loop of your own set optimizer.noise_std, the std of each coordinate, first."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group, self.noise_std)
        return loss

    @torch.no_grad()
    def scales(self) -> dict[Tensor, Tensor]:
        """What gradients are to be multiplied by before they are clipped; nothing at first."""
        if not self.prescaled or not self.state:
            return {}
        moments = {p: state["second"] for p, state in self.state.items()}
        mean = sum(v.sum() for v in moments.values()) / sum(v.numel() for v in moments.values())
        if not float(mean) > 0:
            return {}
        return {p: (mean / (v + 1e-3 * mean)).sqrt().float() for p, v in moments.items()}

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], std: float) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
            state["noise"] = torch.zeros((), dtype=torch.float64)
        state["step"] += 1
        signal = shrink(grad, std) if group["shrinkage"] and grad.dim() == 2 else grad
        state["first"].mul_(beta1).add_(signal, alpha=1 - beta1)
        state["second"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["noise"].mul_(beta2).add_((1 - beta2) * std**2)
        first = state["first"] / (1 - beta1 ** float(state["step"]))
        second = state["second"] / (1 - beta2 ** float(state["step"]))
        if group["second_moment"] == "corrected":
            noise = float(state["noise"]) / (1 - beta2 ** float(state["step"]))
            below = (second - noise).clamp_min(group["floor"]).sqrt()
        else:
            below = second.sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, below, value=-group["lr"])
