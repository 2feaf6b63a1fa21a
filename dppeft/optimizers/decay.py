"""Weight decay for private training: strong enough to hold a size, or towards the start.

Under differential privacy Adam's normalised step is almost white noise of unit variance, so without
decay a weight grows as rms**2 = s**2 + lr**2 * t, whatever it learns. Where its output is
normalised, gradients shrink with 1 / rms and the signal drowns (Anil et al., 2021). Decoupled
decay ``lr * lambda * theta`` (AdamW) stops the growth at

    rms = sqrt(lr / (2 lambda)), reached in about 1 / (2 lr lambda) steps,

so the value that holds a tensor at its start rms s is lambda = lr / (2 s**2): 0.63 for BERT's
s = 0.02 and lr = 5e-4, where the customary 0.01 does nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft.errors import ArgumentError, ArgumentTypeError

__all__ = ["AdamWTowardsStart", "decay_groups", "feeding_a_norm"]


def feeding_a_norm(model: nn.Module) -> list[str]:
    """Trained weight matrices whose output goes into a normalisation, found by position.

    Rule: among the direct children of one module, the ``nn.Linear`` that stands last before a
    normalisation (``LayerNorm``, ``RMSNorm`` or a class named so), with nothing between that has
    weights; and where an ``nn.Embedding`` stands there, all embeddings of that module, which are
    added up. In BERT and RoBERTa these are the embeddings, the dense layers that end attention and
    feed-forward block, and the one before the norm of the masked-language head.

    Limits: strictly, scaling such a weight changes nothing only where nothing is added before the
    norm. In a post-norm residual block the weight's output is added to the residual stream:
    scaling it changes the balance of the two. Of the three embeddings all would have to be scaled
    together, and one that is tied to the output layer also sets the size of the logits. All of
    them are held at their start by the same value, which is what the decay is for. Where a norm
    stands in another module than the layer before it (DistilBERT's blocks, pre-norm models) the
    layer is not found: name it with ``tensors=``.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, None] = {}
    for module in model.modules():
        children = list(module.children())
        for position, child in enumerate(children):
            if "norm" in type(child).__name__.lower():
                for layer in _summands(children, position):
                    if id(layer.weight) in names:
                        found[names[id(layer.weight)]] = None
    return list(found)


def _summands(children: list[nn.Module], norm: int) -> list[Any]:
    """The layers before the norm at index ``norm`` whose outputs reach it, by position."""
    for layer in reversed(children[:norm]):
        if isinstance(layer, nn.Linear):
            return [layer]
        if isinstance(layer, nn.Embedding):
            return [child for child in children if isinstance(child, nn.Embedding)]
        if any(True for _ in layer.parameters()):
            break
    return []


def decay_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: str | float = "auto",
    tensors: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for ``torch.optim.AdamW``: some tensors decay, all others do not.

    ``"auto"``: each tensor decays by lambda = lr / (2 s**2) with s its root mean square now, which
    makes s the stationary size under pure noise. A number: that much for all of them. With a
    schedule of the rate, ``lr`` is its peak: lambda stays, so the size follows the rate down.

    Args:
        model: after ``dppeft.wrap``, with its start values.
        lr: learning rate of every group.
        weight_decay: "auto" or a number >= 0.
        tensors: names as in ``model.named_parameters()`` that decay. Default: those of
            :func:`feeding_a_norm`.

    Returns:
        One group for each tensor that decays under "auto" (one for all of them under a number),
        then one without decay for all others that train.

    Raises:
        ArgumentError: no such tensor, none found, one that is all zero under "auto", or a decay
            that would turn a weight's sign in one step.
        ArgumentTypeError: ``weight_decay`` or ``tensors`` has the wrong type.
    """
    lr = _validate.positive(lr=lr)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = _chosen(model, trained, tensors)
    if isinstance(weight_decay, str):
        _validate.one_of(("auto",), weight_decay=weight_decay)
        groups = [
            {"params": [trained[name]], "lr": lr, "weight_decay": _holding(name, trained[name], lr)}
            for name in chosen
        ]
    else:
        decay = _validate.non_negative(weight_decay=weight_decay)
        if lr * decay >= 1:
            raise ArgumentError(
                f"Expected lr * weight_decay < 1, got {lr:g} * {decay:g}: a step would turn the "
                "sign of the weights. Use a smaller value; lr / (2 rms**2) holds a size."
            )
        params = [trained[name] for name in chosen]
        groups = [{"params": params, "lr": lr, "weight_decay": decay}]
    rest = [p for name, p in trained.items() if name not in set(chosen)]
    return [*groups, {"params": rest, "lr": lr, "weight_decay": 0.0}] if rest else groups


def _chosen(
    model: nn.Module, trained: dict[str, nn.Parameter], tensors: Iterable[str] | None
) -> list[str]:
    if tensors is None:
        found = feeding_a_norm(model)
        if not found:
            raise ArgumentError(
                f"{type(model).__name__} trains no linear layer or embedding that stands before a "
                "normalisation in one module. Name what should decay with tensors=, as in "
                "model.named_parameters(), or use AdamW without groups."
            )
        return found
    if isinstance(tensors, str):
        raise ArgumentTypeError(f"Expected tensors to be a list of names, got {tensors!r}.")
    names = list(dict.fromkeys(tensors))
    for name in names:
        if name not in trained:
            near = difflib.get_close_matches(str(name), list(trained), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"tensors= names {name!r}, which is no trained tensor of {type(model).__name__}."
                f"{hint}"
            )
    if not names:
        raise ArgumentError("tensors=[] names nothing that decays. Use AdamW without groups.")
    return names


def _holding(name: str, parameter: Tensor, lr: float) -> float:
    """The decay that holds a tensor at its size."""
    rms = float(parameter.detach().double().square().mean().sqrt())
    if rms == 0:
        raise ArgumentError(
            f"{name!r} is all zero, so weight_decay='auto' has no size to hold it at. Leave it out "
            "with tensors=, or give a number for weight_decay."
        )
    if lr >= rms * 2**0.5:
        raise ArgumentError(
            f"lr={lr:g} is too large for {name!r} of root mean square {rms:.3g}: one step would "
            f"move it by more than its size. Use lr well below {rms:.2g}."
        )
    return lr / (2 * rms**2)


class AdamWTowardsStart(torch.optim.AdamW):
    """AdamW whose decay pulls towards the values at the first step instead of towards 0.

    theta <- theta - lr * weight_decay * (theta - start), then Adam's step. For fine-tuning: decay
    towards 0 would destroy the pretrained weights, while the noise's random walk away from them is
    what decay should stop. Its stationary distance from the start is sqrt(lr / (2 weight_decay)),
    as AdamW's from 0.

    ``start`` is kept in the optimizer's state, so it is saved, restored and moved with it; it costs
    as much memory as the weights. A tensor without a gradient does not move.

    Args:
        params: as for ``torch.optim.AdamW``.
        lr: learning rate.
        weight_decay: of the difference to the start, >= 0.
        options: further ones of ``torch.optim.AdamW``.

    Raises:
        ArgumentError: lr * weight_decay of a group is 1 or more.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, weight_decay: float = 1e-2, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **options)
        for group in self.param_groups:
            if group["lr"] * group["weight_decay"] >= 1:
                raise ArgumentError(
                    f"Expected lr * weight_decay < 1, got {group['lr']:g} * "
                    f"{group['weight_decay']:g}: a step would overshoot the start. Use less."
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        new: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            pull = group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if "start" in self.state.get(parameter, {}):
                    parameter.lerp_(self.state[parameter]["start"], float(pull))
                else:  # here, before the first step, it is its own start
                    new[parameter] = parameter.detach().clone()
        # AdamW's own decay, towards 0, is off meanwhile.
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        try:
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        for parameter, start in new.items():
            self.state[parameter]["start"] = start  # AdamW makes its own state only where empty
        return loss
