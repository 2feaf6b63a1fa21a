"""A classifier on a pretrained encoder, with the pooling that the encoder's folder states."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dppeft.errors import DataError
from dppeft.text import collator_for


class SentenceClassifier(PreTrainedModel):
    """An encoder, the pooling it was trained with, and a linear head called ``classifier``.

    A sentence encoder puts its meaning into the mean over tokens (or whatever its folder's
    ``1_Pooling/config.json`` says), not into the first token that
    ``AutoModelForSequenceClassification`` reads. The head starts at zero: the first updates then
    depend on the features alone, not on a random projection of them.
    """

    base_model_prefix = "encoder"
    _supports_sdpa = True

    def __init__(self, encoder: PreTrainedModel, *, num_labels: int, pooling: str) -> None:
        super().__init__(encoder.config)
        self.config.num_labels = num_labels
        self.num_labels = num_labels
        self.pooling = pooling
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.config.hidden_size, num_labels)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor,  # (B, T)
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,  # (B,)
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels); the mean loss too when labels are given, as in transformers."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        hidden = self.encoder(**inputs).last_hidden_state
        logits = self.classifier(pool(hidden, attention_mask, self.pooling))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def pool(hidden: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """(B, T, d) -> (B, d), over the tokens that ``attention_mask`` (B, T) marks."""
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    if pooling == "cls_token":
        return hidden[:, 0]
    if pooling == "max_tokens":
        return hidden.masked_fill(mask == 0, float("-inf")).amax(dim=1)
    total, count = (hidden * mask).sum(dim=1), mask.sum(dim=1).clamp_min(1)
    return total / (count.sqrt() if pooling == "mean_sqrt_len_tokens" else count)


def stated_pooling(directory: Path) -> str | None:
    """The pooling that a sentence encoder's folder states; None where it states none.

    Raises:
        DataError: it states several at once, or one that is not known here.
    """
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    stated = json.loads(path.read_text())
    modes = [key.removeprefix("pooling_mode_") for key, on in stated.items() if on is True]
    known = ("mean_tokens", "cls_token", "max_tokens", "mean_sqrt_len_tokens")
    if len(modes) != 1 or modes[0] not in known:
        raise DataError(f"{path} states pooling {modes}; expected one of {', '.join(known)}.")
    return modes[0]


def build_classifier(
    model: str | Path, *, num_labels: int, dropout: float = 0.0
) -> PreTrainedModel:
    """The classifier for a model folder or hub name.

    A folder with ``1_Pooling/config.json`` gives a ``SentenceClassifier``; any other model what
    transformers builds. Dropout is off: clipped gradients need no further noise.
    """
    pooling = stated_pooling(Path(model))
    if pooling is None:
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels)
    encoder = AutoModel.from_pretrained(
        model,
        add_pooling_layer=False,  # the pre-training head of the first token; not used here
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return SentenceClassifier(encoder, num_labels=num_labels, pooling=pooling)


def _own_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


@torch.inference_mode()
def predict(
    model: nn.Module,
    encoded: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    tokens: int = 4096,
    logits_of: Callable[[nn.Module, dict[str, Tensor]], Tensor] = _own_logits,
) -> Tensor:
    """Logits (N, C) of tokenised rows, in their order; sorted by length inside, so little padding.

    Args:
        model: in any mode; put into evaluation mode for the call, and back.
        encoded: rows of ``input_ids`` and ``attention_mask`` (and ``token_type_ids``).
        tokenizer: pads.
        tokens: padded tokens per forward pass.
        logits_of: ``(model, batch) -> (B, C)``.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]["input_ids"]))
    logits: list[Tensor] = []
    collate = collator_for(tokenizer)
    start = 0
    while start < len(order):
        end = start + 1  # rows of a batch are at most as long as the last one taken
        while (
            end < len(order) and (end + 1 - start) * len(encoded[order[end]]["input_ids"]) <= tokens
        ):
            end += 1
        batch = collate([encoded[i] for i in order[start:end]])
        found = logits_of(model, {key: value.to(device) for key, value in batch.items()})
        logits.append(found.float().cpu())
        start = end
    model.train(training)
    by_length = torch.cat(logits)
    return torch.empty_like(by_length).index_copy_(0, torch.tensor(order), by_length)
