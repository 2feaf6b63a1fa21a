"""The gradient carriers of one matrix: where an example's gradient is measured, and what it means.

For orthonormal L (p, r) and R (r, d) the gradient G (p, d) of a matrix has the coordinates
``dL = G R^T`` and ``dR = L^T G`` in the tangent space of the rank-r matrices at L R, and

    (I - L L^T) dL R + L dR  =  G - (I - L L^T) G (I - R^T R)

is its projection there (Yu et al. 2021, Section 3; with a minus before the overlap ``L L^T dL R``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DEPENDENT = 1e-5  # a column this much smaller than the largest adds no direction of its own


class _Carried(torch.autograd.Function):
    """The output itself; in the backward, the carriers' gradients from what is known already."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, carriers: Carriers, *_own: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.carriers = carriers
        return y.clone()  # not a view: models may write into it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        found = ctx.carriers.example_gradients(x, grad)
        return grad, None, None, *(found[name].sum(0) for name in ctx.carriers.names)


class Carriers(nn.Module):
    """The trained coordinates of one matrix, and the directions that they belong to.

    The coordinates ``left`` (p, r) and ``right`` (r, d) are zero whenever an update begins: they
    are where gradients arrive. Displaced, they add ``(I - L L^T) left R + L right`` to the matrix.

    Args:
        shape: (p, d) of the matrix.
        rank: r, at most p and d.
        sides: "both", or "left" or "right" alone: then the update is ``dL R`` or ``L dR``.
        clip: "tangent" or "joint": whether ``left`` counts without the overlap with ``right``.
        geometry: kernel_size, stride, padding and dilation of a convolution, whose matrix is
            (channels out, channels in x kernel); None of a linear layer.
    """

    basis_left: Tensor  # L
    basis_right: Tensor  # R

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        rank: int,
        sides: str,
        clip: str,
        geometry: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        (p, d), r = shape, min(rank, *shape)
        self.names = [name for name in ("left", "right") if sides in ("both", name)]
        self.overlaps = sides == "both"
        self.projects = self.overlaps and clip == "tangent"
        self.geometry = geometry
        if "left" in self.names:
            self.left = nn.Parameter(torch.zeros(p, r))
        if "right" in self.names:
            self.right = nn.Parameter(torch.zeros(r, d))
        self.register_buffer("basis_left", torch.eye(p, r))
        self.register_buffer("basis_right", torch.eye(r, d))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output y for its input x, depending from here on on the coordinates."""
        own = self._own()
        # A look at the values is nothing on a CPU; elsewhere it would wait for the device.
        if y.device.type != "cpu" or any(bool(part.detach().any()) for part in own.values()):
            return y + self._read(x).to(y.dtype)
        if torch.is_grad_enabled() and any(part.requires_grad for part in own.values()):
            return _Carried.apply(y, x, self, *own.values())
        return y

    def example_gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Each example's gradients of the coordinates, (B, p, r) and (B, r, d), without any G.

        ``dL_i = B^T (A R^T)`` and ``dR_i = (B L)^T A`` from the inputs A (T, d) and the output
        gradients B (T, p) at the T positions of example i.
        """
        a, b = wide(self._inputs(x)), wide(self._outputs(grad))
        found = {}
        if "left" in self.names:
            left = b.transpose(1, 2) @ (a @ self.basis_right.to(a.dtype).T)
            found["left"] = self._beside(left) if self.projects else left
        if "right" in self.names:
            found["right"] = (b @ self.basis_left.to(b.dtype)).transpose(1, 2) @ a
        return found

    def lift(self, gradients: dict[str, Tensor]) -> Tensor:
        """The gradient of the matrix (p, d) that gradients of the coordinates, noised, stand for.

        Noise of standard deviation s in both has the energy ``s^2 r (p + d - r)`` in it, the same
        in every direction of the tangent space.
        """
        return self._joined(gradients, beside=self.overlaps)

    def displacement(self) -> Tensor:
        """What the coordinates add to the matrix (p, d) as they are."""
        return self._joined(self._own(), beside=self.projects)

    @torch.no_grad()
    def rebuild(
        self,
        history: Tensor,
        *,
        power_iters: int,
        generator: torch.Generator,
        warm: bool = False,
    ) -> None:
        """New carriers: the leading directions of ``history`` (p, d), random where it has none.

        Args:
            history: made of released weights alone.
            power_iters: iterations.
            generator: public; the start, and what fills up.
            warm: start from the present carriers instead.
        """
        right = self.basis_right.to(history)
        if not warm:
            right = torch.randn(right.shape, generator=generator).to(history)
        for _ in range(power_iters):
            left = orthonormal(history @ right.T, generator)
            right = left.T @ history
        self.basis_left.copy_(left)
        self.basis_right.copy_(orthonormal(right.T, generator).T)

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def _beside(self, left: Tensor) -> Tensor:
        """``(I - L L^T) left``."""
        basis = self.basis_left.to(left.dtype)
        return left - basis @ (basis.T @ left)

    def _joined(self, parts: dict[str, Tensor], *, beside: bool) -> Tensor:
        terms = []
        if "left" in parts:
            left = self._beside(parts["left"]) if beside else parts["left"]
            terms.append(left @ self.basis_right.to(left.dtype))
        if "right" in parts:
            terms.append(self.basis_left.to(parts["right"].dtype) @ parts["right"])
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _read(self, x: Tensor) -> Tensor:
        """The displacement applied to x: into r channels and back."""
        own = self._own()
        total: Tensor | float = 0.0
        if "left" in own:
            left = self._beside(own["left"]) if self.projects else own["left"]
            total = total + self._through(x, self.basis_right, left)
        if "right" in own:
            total = total + self._through(x, own["right"], self.basis_left)
        assert isinstance(total, Tensor)
        return total

    def _through(self, x: Tensor, into: Tensor, back: Tensor) -> Tensor:
        if self.geometry is None:
            return F.linear(F.linear(x.to(into.dtype), into), back)
        options = {key: value for key, value in self.geometry.items() if key != "kernel_size"}
        kernel = into.view(len(into), -1, *self.geometry["kernel_size"])
        return F.conv2d(F.conv2d(x.to(into.dtype), kernel, **options), back[:, :, None, None])

    def _inputs(self, x: Tensor) -> Tensor:
        """(B, *, d), or (B, channels, height, width) -> (B, T, d)."""
        if self.geometry is None:
            return x.reshape(len(x), -1, x.shape[-1])
        return F.unfold(x, **self.geometry).transpose(1, 2)

    def _outputs(self, grad: Tensor) -> Tensor:
        """(B, *, p), or (B, p, height, width) -> (B, T, p)."""
        if self.geometry is None:
            return grad.reshape(len(grad), -1, grad.shape[-1])
        return grad.flatten(2).transpose(1, 2)


def orthonormal(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal columns (p, r) that span those of ``matrix``; random ones where it has fewer.

    r is at most p. The zero matrix gives random columns.
    """
    columns, triangle = torch.linalg.qr(matrix)
    largest = float(matrix.norm(dim=0).max())
    lost = ~(triangle.diagonal().abs() > _DEPENDENT * largest)
    if not bool(lost.any()):
        return columns
    filled = matrix / largest if largest > 0 else matrix.clone()
    fresh = torch.randn(len(matrix), int(lost.sum()), generator=generator)
    filled[:, lost] = fresh.to(matrix) / math.sqrt(len(matrix))
    return torch.linalg.qr(filled)[0]


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
