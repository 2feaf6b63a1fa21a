"""``merge``: the base model with the adapter folded into its weights."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.sharing.contents import peel
from dppeft.tuners import registry

if TYPE_CHECKING:
    from peft import PeftModel


def merge(model: nn.Module) -> nn.Module:
    """The base model with the adapter folded in: the same outputs, at the base model's cost.

    Works in place, as PEFT's ``merge_and_unload`` does: the wrapped model is used up. To keep the
    adapter, export it first.

    Raises:
        ArgumentTypeError: the model has no adapter.
        ArgumentError: the method cannot be folded in, or a targeted weight is tied to another
            layer, which would change with it.
    """
    model = peel(model)
    if not hasattr(model, "peft_config"):
        raise ArgumentTypeError(
            f"{type(model).__name__} has no adapter to merge. Expected a model of dppeft.wrap or "
            "dppeft.load (after method 'full' there is nothing to merge)."
        )
    method = registry.method_of(model)
    if model.peft_config[model.active_adapter].is_prompt_learning or not hasattr(
        model.base_model, "merge_and_unload"
    ):
        raise ArgumentError(
            f"Method {method!r} changes the inputs of layers, not their weights: there is nothing "
            "to fold in. Use the wrapped model as it is."
        )
    _refuse_tied(model)
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise ArgumentError(
            f"PEFT cannot fold {method!r} in: {' '.join(str(error).split())} Use the wrapped model "
            "as it is; load it again before."
        ) from error
    _untie_config(merged)
    return merged


def _refuse_tied(model: PeftModel) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        if any(uses[id(parameter)] > 1 for parameter in base.parameters(recurse=False)):
            raise ArgumentError(
                f"The weight of {name.removeprefix('base_model.model.')} is tied to another "
                "layer, which folding the adapter in would change as well. Use the wrapped model "
                "as it is, or untie them before wrapping."
            )


def _untie_config(model: nn.Module) -> None:
    """A head trained whole is no longer the embedding: saving must not tie them again."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if output is not None and output.weight is not embedding.weight:
        config.tie_word_embeddings = False
