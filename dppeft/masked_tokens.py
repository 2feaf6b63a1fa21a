"""The masked-language loss, with the head called at the targets alone.

A model called whole projects all T positions of a row to the vocabulary, and the loss looks at the
15 % of them that are targets. In a small model that projection is most of the work: here the rest
is left out. The value is the same (RoBERTa's own pre-training does so too).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dppeft._kind import kind_of, modes_kept, unwrap
from dppeft._types import Batch
from dppeft.errors import ArgumentError, UnsupportedModelError
from dppeft.loss import IGNORED, check_smoothing, cross_entropy, refuse_own_loss
from dppeft.text.synthetic import synthetic_rows


@dataclass(frozen=True, kw_only=True)
class MaskedTokenLoss:
    """``(model, batch) -> (B,)``: mean cross-entropy over each row's own targets, 0 without any.

    The value of ``dppeft.loss.default_loss``, for heads like BERT's, RoBERTa's and DistilBERT's.
    ``labels`` (B, T) of the batch are token numbers, -100 where there is no target.

    Args:
        label_smoothing: weight in [0, 1) of the uniform distribution.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Refuses a weight that leaves none for the labels."""
        check_smoothing(self.label_smoothing)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row, float32 or wider."""
        logits, targets = self.logits(model, batch)
        flat = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=self.label_smoothing
        )
        counts = (targets != IGNORED).sum(dim=1).clamp_min(1)
        return flat.view_as(targets).sum(dim=1) / counts

    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (B, K, V) at the targets, in the order of the tokens, and the targets (B, K).

        K is the largest number of targets of a row; rows with fewer are filled with positions
        whose target is -100.
        """
        labels = batch.get("labels")
        if labels is None or labels.shape != batch["input_ids"].shape:
            raise ArgumentError(
                "Expected labels of the shape of input_ids, a token number at each target and "
                f"{IGNORED} elsewhere. Read the rows through dppeft.text.MaskedRows."
            )
        base = unwrap(model)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = getattr(base, base.base_model_prefix)(**inputs)[0]  # (B, T, d)
        none = (labels == IGNORED).to(torch.uint8)
        # On a GPU this waits for the device, once a batch; the logits left out cost far more.
        most = max(1, labels.shape[1] - int(none.sum(dim=1).min()))
        positions = none.argsort(dim=1, stable=True)[:, :most]  # the targets first
        chosen = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = base.get_output_embeddings()(head_features(base, chosen))
        return logits, labels.long().gather(1, positions)

    def made_up_rows(self, model: nn.Module) -> Batch:
        """Rows to prove the model on before any private row is used, once it is known to fit."""
        refuse_unless_masked(model)
        device = next(model.parameters()).device
        rows = synthetic_rows(unwrap(model)).items()
        batch = {name: value.to(device) for name, value in rows}

        def in_parts() -> Tensor:
            logits, targets = self.logits(model, batch)
            return logits[targets != IGNORED]

        inputs = {name: value for name, value in batch.items() if name != "labels"}
        wanted = batch["labels"] != IGNORED
        refuse_other_logits(model, inputs, in_parts, lambda logits: logits[wanted])
        return batch

    def check(self, model: nn.Module) -> None:
        """Refuses a model whose logits at the targets are not computed as here.

        Raises:
            UnsupportedModelError: no masked-language-modelling head, one that is not known, or a
                method that adds tokens to the input or a term to the loss.
        """
        self.made_up_rows(model)


def refuse_unless_masked(model: nn.Module) -> None:
    """Refuses what cannot be called in parts: body, then the head at some positions.

    Raises:
        UnsupportedModelError: no masked language model, or a method that adds tokens to the input
            or a term to the loss.
    """
    base = unwrap(model)
    if kind_of(base) != "masked_lm":
        raise UnsupportedModelError(
            f"{type(base).__name__} is no masked language model, whose head is called at the masks "
            "alone. Load it with AutoModelForMaskedLM, or train a classification head."
        )
    for config in (getattr(model, "peft_config", None) or {}).values():
        if config.is_prompt_learning:
            raise UnsupportedModelError(
                f"{type(config).__name__} puts tokens before the input, which a head called at the "
                "masks alone does not see. Use lora, adapter, compacter, rgp or full."
            )
    refuse_own_loss(model)


def refuse_other_logits(
    model: nn.Module,
    inputs: Batch,
    in_parts: Callable[[], Tensor],
    of_whole: Callable[[Tensor], Tensor],
) -> None:
    """Refuses a model that, called whole, gives other logits than its parts called in order.

    Args:
        model: a masked language model; put into evaluation mode for the call, and back.
        inputs: what it takes, no labels.
        in_parts: some of the logits of these inputs.
        of_whole: the same ones out of all, (B, T, V).

    Raises:
        UnsupportedModelError: they differ.
    """
    with modes_kept(model), torch.no_grad():
        model.eval()
        found, expected = in_parts(), of_whole(model(**inputs).logits)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__}: its logits at the masks are not those of its parts "
            "called in order. Known are heads like BERT's, RoBERTa's and DistilBERT's; a loss of "
            "all logits (dppeft.loss.default_loss) calls the model whole."
        )


def head_features(base: nn.Module, hidden: Tensor) -> Tensor:
    """What a masked language model's head puts before its projection to the vocabulary.

    Args:
        base: with a head like BERT's (``cls``), RoBERTa's (``lm_head``) or DistilBERT's.
        hidden: (B, *, d).

    Raises:
        UnsupportedModelError: another head.
    """
    predictions = getattr(getattr(base, "cls", None), "predictions", None)
    if hasattr(predictions, "transform"):
        return predictions.transform(hidden)
    if hasattr(base, "vocab_transform"):
        return base.vocab_layer_norm(base.activation(base.vocab_transform(hidden)))
    head = getattr(base, "lm_head", None)
    if hasattr(head, "dense") and hasattr(head, "layer_norm"):
        return head.layer_norm(F.gelu(head.dense(hidden)))
    raise UnsupportedModelError(
        f"{type(base).__name__} has no head like BERT's, RoBERTa's or DistilBERT's, which "
        "is taken apart here. Use one of those, or a classification head."
    )
