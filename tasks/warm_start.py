"""A warm start of the head on the encoder's own features: private steps that cost little time.

The encoder is frozen meanwhile, so each row's features are computed once. The steps come from the
same budget as those of the adapter that follow, and stand in the same ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

import dppeft
from tasks.classifier import SentenceClassifier, predict
from tasks.common import Recipe
from tasks.training import Fit, fit


class Features(Dataset):
    """Rows as the pooled features (N, d) of a frozen encoder."""

    def __init__(self, features: Tensor, labels: Sequence[int]) -> None:
        self.features = features
        self.labels = labels

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row."""
        return {"features": self.features[index], "labels": self.labels[index]}


class HeadOnly(nn.Module):
    """The classifier's own head, called on features."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> logits (B, num_labels)."""
        return self.classifier(features)


def part_of(plan: Any, steps: int) -> Any:
    """So many of a plan's steps, with its rate and noise: all parts compose to the plan."""
    return dppeft.plan(
        num_examples=plan.num_examples,
        batch_size=plan.expected_batch_size,
        steps=steps,
        delta=plan.delta,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,
        accountant=plan.accountant,
    )


def frozen_features(
    base: SentenceClassifier, rows: Sequence[dict[str, list[int]]], tokenizer: Any
) -> Tensor:
    """What the head of ``base`` reads of each row, (N, d), while the encoder is as loaded."""
    classifier = base.classifier
    base.classifier = nn.Identity()
    features = predict(base, rows, tokenizer)
    base.classifier = classifier
    return features


def warm_start(
    base: SentenceClassifier,
    features: Tensor,
    labels: Sequence[int],
    plan: Any,
    recipe: Recipe,
    *,
    options: Mapping[str, Any],
) -> Fit:
    """Train the head of ``base`` in place, for the first ``recipe.head_steps`` of the plan's steps.

    Args:
        base: not wrapped yet.
        features: (N, d) of the private rows, from ``frozen_features``.
        labels: their classes.
        plan: of the whole run.
        recipe: learning rate and label smoothing.
        options: further arguments of ``dppeft.make_private``.
    """
    return fit(
        HeadOnly(base.classifier),
        Features(features, labels),
        part_of(plan, recipe.head_steps),
        recipe.for_warm_start(),
        options={**options, "physical_batch_size": 4096},
    )
