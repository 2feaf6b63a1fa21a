"""Thresholds that follow a quantile of the gradient norms, at a price that is in the plan.

Each example adds to the sum, beside its clipped gradient, one coordinate per threshold: +s/2 where
its norm is within the threshold, else -s/2. Gradient and counts are *one* vector of bounded length,
one Gaussian release, one entry of the ledger: the accountant sees nothing new, and the price is
that the noise on the gradient follows the longer vector. With ``s`` chosen for a count noise
``sigma_b`` that is the formula of Andrew et al. (2021), Theorem 1,
``sigma_gradient = (sigma^-2 - (2 sigma_b)^-2)^(-1/2)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppeft import _validate
from dppeft.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """How the clipping threshold follows the norms (Andrew et al. 2021, arXiv 1905.03871).

    Attributes:
        quantile: share of the examples that should be within the threshold, in (0, 1).
        learning_rate: the threshold moves by at most a factor ``exp(learning_rate)`` per update.
        count_noise: noise std of the count of examples within (sigma_b). Default: a twentieth of
            the expected batch size, as in the paper.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        _validate.probability(quantile=self.quantile)
        _validate.positive(learning_rate=self.learning_rate)
        if self.count_noise is not None:
            _validate.positive(count_noise=self.count_noise)

    def scale(
        self, bound: float, *, thresholds: int, noise_multiplier: float, expected_batch_size: float
    ) -> float:
        """``s``: what one example within its threshold weighs against one that is not.

        Args:
            bound: L2 bound of the gradients alone.
            thresholds: how many counts there are.
            noise_multiplier: of the whole release.
            expected_batch_size: of the step.

        Raises:
            ArgumentError: so little noise on the counts costs more than the whole budget.
        """
        if noise_multiplier == 0:
            return bound
        count_noise = self.count_noise or expected_batch_size / 20
        left = 1 - thresholds * (noise_multiplier / (2 * count_noise)) ** 2
        if left <= 0:
            least = math.sqrt(thresholds) * noise_multiplier / 2
            raise ArgumentError(
                f"count_noise={count_noise:g} is too little for noise_multiplier="
                f"{noise_multiplier:.4g}: {thresholds} count(s) with so little noise would spend "
                f"more than the whole budget. Give count_noise well above {least:.3g}, a larger "
                "batch, or fixed thresholds (adaptive=None)."
            )
        return noise_multiplier * bound / math.sqrt(left) / count_noise

    def price(self, **step: float) -> float:
        """Noise on the gradient over that without adaptation; arguments as in ``scale``."""
        scale = self.scale(1.0, **step)  # type: ignore[arg-type]
        return joint_bound(1.0, scale, int(step["thresholds"]))

    def moved(self, threshold: float, share_within: float) -> float:
        """The next threshold: ``C exp(-learning_rate (share - quantile))``."""
        share = min(max(share_within, 0.0), 1.0)
        return threshold * math.exp(-self.learning_rate * (share - self.quantile))


def joint_bound(bound: float, scale: float, thresholds: int) -> float:
    """L2 bound of an example's gradient (``bound``) and its ``thresholds`` counts together."""
    return math.sqrt(bound**2 + thresholds * (scale / 2) ** 2)
