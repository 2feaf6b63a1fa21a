"""Text rows -> tokens -> a private run; and what a result stands beside."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import HashingVectorizer
from torch import nn
from torch.utils.data import Dataset

import dppeft
from dppeft.loss import default_loss
from dppeft.text import TokenizedRows, collator_for, tokenize_rows
from tasks.common import Recipe, Rows
from tasks.settings import stated_epsilon

Progress = Callable[[int], None]  # called with the number of steps made


def encode(rows: Rows, tokenizer: Any, recipe: Recipe) -> TokenizedRows:
    """Token ids of each row, cut to ``max_length``; and how many rows lost something (private)."""
    tokenizer.truncation_side = recipe.truncation
    # Characters that cannot survive the cut need not be tokenised: long reviews are ten times it.
    limit = 16 * recipe.max_length
    cut = slice(-limit, None) if recipe.truncation == "left" else slice(limit)
    texts = [text[cut] for text in rows.texts]
    pairs = None if rows.pairs is None else [text[cut] for text in rows.pairs]
    return tokenize_rows(tokenizer, texts, pairs, max_length=recipe.max_length)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A finished run and what it cost in time. ``examples_per_second`` counts expected examples.

    ``signal``: a record for each step of how the released gradient's signal and noise compare,
    where that was asked for.
    """

    run: Any
    seconds: float
    signal: Sequence[Any] = ()

    @property
    def examples_per_second(self) -> float:
        """From the plan's batch size: the number really drawn is private."""
        plan = self.run.plan
        return plan.steps * plan.expected_batch_size / max(self.seconds, 1e-9)


def make_optimizer(
    model: nn.Module, recipe: Recipe, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Adam with one rate for the head and one for the rest; both follow the recipe's schedule."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    head = [p for name, p in named if "classifier" in name or "score" in name]
    rest = [p for name, p in named if not ("classifier" in name or "score" in name)]
    groups = [{"params": head, "lr": recipe.head_lr}, {"params": rest, "lr": recipe.lr}]
    optimizer = torch.optim.AdamW(  # without decay this is Adam
        [group for group in groups if group["params"]],
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    rising = math.ceil(recipe.warmup * steps)

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 1.0 if recipe.schedule == "constant" else 1 - (step - rising) / (steps - rising)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def adapted_layers(base: nn.Module, method: str, recipe: Recipe) -> dict[str, Any]:
    """The option of ``dppeft.wrap`` that leaves the lowest layers bare, where the method has it."""
    layers = getattr(base.config, "num_hidden_layers", 0)
    bare = int(recipe.bare_layers * layers)
    if not bare or "layers_to_transform" not in dppeft.methods()[method].options:
        return {}
    return {"layers_to_transform": list(range(bare, layers))}


def fit(
    model: nn.Module,
    dataset: Dataset,
    plan: Any,
    recipe: Recipe,
    *,
    tokenizer: Any = None,
    loss: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor] | None = None,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> Fit:
    """Train privately, the planned number of steps.

    Args:
        model: wrapped.
        dataset: private rows.
        plan: owns rate, steps and noise.
        recipe: learning rates, clipping, label smoothing.
        tokenizer: pads the rows; None when they need none.
        loss: ``(model, batch) -> (B,)``; default: by the model's kind, with label smoothing.
        progress: called after each step.
        options: further arguments of ``dppeft.make_private``.
    """
    model.train()
    optimizer, schedule = make_optimizer(model, recipe, plan.steps)
    run = dppeft.make_private(
        model,
        optimizer,
        dataset,
        plan,
        collate_fn=None if tokenizer is None else collator_for(tokenizer),
        loss=loss or default_loss(model, label_smoothing=recipe.label_smoothing),
        clipping=recipe.clipping,
        **(options or {}),
    )
    return all_updates(run, schedule, progress)


def all_updates(
    run: Any, schedule: torch.optim.lr_scheduler.LRScheduler, progress: Progress | None = None
) -> Fit:
    """The planned number of updates, the schedule stepped with each."""
    start = time.perf_counter()
    for step, batch in enumerate(run.batches(), start=1):
        run.step(batch)
        schedule.step()
        if progress is not None:
            progress(step)
    return Fit(run=run, seconds=time.perf_counter() - start)


# --- what a result stands beside ------------------------------------------------------------------


def majority_accuracy(labels: Sequence[int]) -> float:
    """Accuracy of always saying the commonest class."""
    return Counter(labels).most_common(1)[0][1] / len(labels)


def accuracy(logits: torch.Tensor, labels: Sequence[int]) -> float:
    """Share of rows whose largest logit is the label's."""
    return float((logits.argmax(dim=1) == torch.tensor(labels)).float().mean())


class HashedWords(Dataset):
    """Rows as hashed counts of their words, each of length 1; made dense when drawn."""

    def __init__(self, rows: Rows, features: int) -> None:
        vectorizer = HashingVectorizer(n_features=features, norm="l2")
        pairs = rows.pairs or [""] * len(rows)
        self.table = vectorizer.transform([
            f"{text} {pair}" for text, pair in zip(rows.texts, pairs, strict=True)
        ]).astype(np.float32)
        self.labels = rows.labels

    def __len__(self) -> int:
        """Number of rows."""
        return self.table.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One row: ``features`` (F,) and ``labels`` ()."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Several rows at once, as torch's own loaders ask for them."""
        dense = torch.from_numpy(self.table[list(indices)].toarray())
        return [
            {"features": row, "labels": torch.tensor(self.labels[index])}
            for row, index in zip(dense, indices, strict=True)
        ]


class LinearWords(nn.Module):
    """Logits (B, C) from features (B, F)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.classifier(features)


# Chosen for the bag of words, on the rows on which the demo's own recipe was chosen.
WORDS_RECIPE = Recipe(epochs=10, batch_size=1024, head_lr=0.1, max_grad_norm=1.0)
WORDS_FEATURES = 2**14


def words_accuracy(
    train: Rows, evaluation: Rows, *, classes: int, plan: Any, options: Mapping[str, Any]
) -> float:
    """Accuracy of the private linear model on hashed words: same engine, same guarantee."""
    own_plan = dppeft.plan(
        num_examples=plan.num_examples,
        batch_size=min(WORDS_RECIPE.batch_size, plan.num_examples),
        epochs=WORDS_RECIPE.epochs,
        epsilon=stated_epsilon(plan),
        delta=plan.delta,
        max_grad_norm=WORDS_RECIPE.max_grad_norm,
    )
    model = LinearWords(WORDS_FEATURES, classes)
    dataset = HashedWords(train, WORDS_FEATURES)
    fit(model, dataset, own_plan, WORDS_RECIPE, options={**options, "physical_batch_size": 1024})
    features = torch.from_numpy(HashedWords(evaluation, WORDS_FEATURES).table.toarray())
    with torch.inference_mode():
        return accuracy(model(features), evaluation.labels)


def without_privacy(plan: Any) -> Any:
    """The same draws and steps with no noise and nothing clipped."""
    return dppeft.plan(
        num_examples=plan.num_examples,
        batch_size=plan.expected_batch_size,
        steps=plan.steps,
        delta=plan.delta,
        noise_multiplier=0.0,
        max_grad_norm=1e9,
    )


def with_settings(recipe: Recipe, **given: Any) -> Recipe:
    """The recipe with every setting that is not None replaced."""
    return dataclasses.replace(recipe, **{k: v for k, v in given.items() if v is not None})
