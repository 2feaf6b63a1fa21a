"""Spectral shrinkage: the part of a noisy matrix gradient that stands out of its noise.

A released matrix gradient is Y = X + s Z, with independent N(0, 1) entries in Z and s = sigma C / B
known exactly. Noise alone has singular values up to about s (sqrt(m) + sqrt(n)); a direction of X
weaker than that cannot be told from it, and a stronger one comes out too long and rotated. Gavish
and Donoho (2017), "Optimal shrinkage of singular values", Eq. (7): with m <= n, beta = m / n and y
a singular value over s sqrt(n), the least squared error is reached by

    eta(y) = sqrt((y**2 - beta - 1)**2 - 4 beta) / y   for y >= 1 + sqrt(beta), else 0.

It is post-processing of what is released: no privacy is spent. (The statement is for large
matrices with few strong directions; for any other it is a rule like another.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dppeft import _validate
from dppeft.errors import ArgumentError

__all__ = ["shrink"]


def shrink(matrix: Tensor, noise_std: float) -> Tensor:
    """The matrix with its singular values shrunk for noise of that size.

    Args:
        matrix: (m, n), with independent N(0, noise_std**2) in each entry.
        noise_std: 0 leaves it as it is.

    Raises:
        ArgumentError: no matrix, or a negative size.
    """
    noise_std = _validate.non_negative(noise_std=noise_std)
    if matrix.dim() != 2:
        raise ArgumentError(f"Expected a matrix, got a tensor of shape {tuple(matrix.shape)}.")
    if noise_std == 0 or not matrix.numel():
        return matrix.clone()
    unit = noise_std * max(matrix.shape) ** 0.5
    beta = min(matrix.shape) / max(matrix.shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    y = (values / unit).clamp_min(1e-30)
    inside = ((y.square() - beta - 1).square() - 4 * beta).clamp_min(0)
    kept = torch.where(y >= 1 + beta**0.5, inside.sqrt() / y, torch.zeros_like(y))
    return ((left * (kept * unit)) @ right).to(matrix.dtype)
