"""RGP: layers and options that it refuses, each with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import dppeft
from tests import tiny


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Standardised(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def _hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _layer, _x, y: 2 * y)
    return layer


def _replaced() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(4, 4, 3, groups=2), "groups=2"),
        (lambda: nn.Conv2d(4, 4, 3, padding="same"), "padding='same'"),
        (lambda: nn.LayerNorm(4), "linear and 2-d convolution"),
        (lambda: Standardised(4, 4, 3), "Standardised has a forward"),
        (lambda: Scaled(4, 4), "a forward of its own"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "made anew"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "made anew"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "made anew"),
        (_hooked, "or a hook"),
        (_replaced, "of its own"),
        (lambda: nn.MultiheadAttention(4, 1).out_proj, "without calling the layer"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's old spectral_norm is deprecated
def test_layers_that_are_no_single_matrix_are_refused(make: Any, message: str) -> None:
    net = nn.Sequential()
    net.add_module("body", make())
    net.add_module("classifier", nn.Linear(4, 2))
    with pytest.raises(dppeft.DppeftError, match=message):
        dppeft.wrap(net, "rgp", target_modules=["body"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r=0"),
        ({"history": "updates"}, "history='updates'"),
        ({"sides": "top"}, "sides='top'"),
        ({"clip": "flat"}, "clip='flat'"),
        ({"decompose_every": 0}, "decompose_every=0"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(dppeft.DppeftError, match=message):
        dppeft.wrap(tiny.build("bert"), "rgp", **options)
