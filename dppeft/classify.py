"""Train, evaluate and use a text classifier from a table of rows: what the command line does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dppeft
from dppeft import _validate
from dppeft.errors import ArgumentError, CheckpointError, DataError
from dppeft.tables import TextTable, text_table
from dppeft.text import TokenDataset, collator_for, encode_labels, tokenize_rows
from dppeft.tuners import registry

Say = Callable[[str], None]  # one line for the person at the terminal
Progress = Callable[[int, Any], None]  # (steps made, plan)

NOTE = "classifier.json"  # beside the adapter: what else is needed to use it


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of the file hold what."""

    text: str
    label: str | None = None
    text_pair: str | None = None
    drop_empty: bool = False

    def read(self, path: Path) -> TextTable:
        """The rows of a file."""
        return text_table(path, **dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A training run of the command line. ``batch_size`` is the expected logical batch.

    None: batch and epochs by the number of rows (``by_size``); no threshold and no kind of
    clipping: ``automatic``, which has none to tune.
    """

    data: Path
    columns: Columns
    model: str
    output: Path
    epsilon: float
    method: str = "lora"
    delta: float | None = None  # None: min(1e-5, 1 / (2 N))
    epochs: float | None = None
    batch_size: int | None = None
    lr: float = 5e-4
    head_lr: float = 5e-3
    max_length: int = 128
    max_grad_norm: float | None = None
    clipping: str | None = None
    pad_token: str | None = None
    eval_data: Path | None = None
    method_options: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)


def train(settings: TrainSettings, *, say: Say, progress: Progress) -> dict[str, Any]:
    """Train privately and write adapter, head, privacy card and note to ``settings.output``.

    Everything that can be refused is refused before a private row is trained on.

    Returns:
        What a program would read: epsilon, delta, steps, output, bytes, and accuracy on
        ``eval_data`` where given.
    """
    _check_output(settings.output)
    registry.info(settings.method)
    table = settings.columns.read(settings.data)
    labels, classes = encode_labels(table.labels or ())
    _check_classes(classes, len(table))
    evaluation = None if settings.eval_data is None else settings.columns.read(settings.eval_data)
    eval_labels = [] if evaluation is None else encode_labels(evaluation.labels or (), classes)[0]
    plan = _plan(settings, len(table))
    _validate.positive(lr=settings.lr)
    _validate.positive(head_lr=settings.head_lr)

    tokenizer = load_tokenizer(settings.model, settings.pad_token)
    base = load_base(settings.model, classes, tokenizer)
    model = dppeft.wrap(base, settings.method, **settings.method_options)
    rows, cut = tokenize_rows(tokenizer, table.texts, table.pairs, max_length=settings.max_length)
    if cut:
        say(f"{cut} rows were cut to {settings.max_length} tokens (not private: for you only)")
    dataset = TokenDataset(rows, labels)
    say(plan.explain())
    run = _fit(model, dataset, plan, settings, tokenizer=tokenizer, progress=progress)
    run.note_look("the names of the classes, read from the label column")
    dppeft.export(model, settings.output, spent=run.card())
    note = {
        "classes": classes,
        "max_length": settings.max_length,
        "base_model": settings.model,
        "pad_token": settings.pad_token,
        "columns": dataclasses.asdict(settings.columns),
    }
    (settings.output / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in settings.output.rglob("*") if file.is_file())
    result = {**dataclasses.asdict(run.spent()), "output": str(settings.output), "bytes": size}
    if evaluation is not None:
        result |= _scores(_logits(model, evaluation, tokenizer, settings.max_length), eval_labels)
    return result


def evaluate(
    adapter: Path, data: Path, columns: Columns, *, model: str | None = None
) -> dict[str, Any]:
    """Accuracy of a shared adapter on labelled rows, beside that of the commonest class."""
    note = read_note(adapter)
    table = columns.read(data)
    labels, _ = encode_labels(table.labels or (), note["classes"])
    tuned, tokenizer = _load(adapter, note, model)
    return _scores(_logits(tuned, table, tokenizer, note["max_length"]), labels)


def predict(adapter: Path, table: TextTable, *, model: str | None = None) -> list[dict[str, Any]]:
    """Class and probability of each row."""
    note = read_note(adapter)
    tuned, tokenizer = _load(adapter, note, model)
    best = _logits(tuned, table, tokenizer, note["max_length"]).softmax(dim=1).max(dim=1)
    return [
        {"text": text, "label": note["classes"][index], "probability": round(chance, 4)}
        for text, index, chance in zip(
            table.texts, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def read_note(adapter: Path) -> dict[str, Any]:
    """What ``train`` wrote beside the adapter.

    Raises:
        CheckpointError: the folder is not one that ``dppeft train`` wrote.
    """
    try:
        note = json.loads((adapter / NOTE).read_text(encoding="utf-8"))
        return {key: note[key] for key in ("classes", "max_length", "base_model", "columns")} | note
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{adapter} has no readable {NOTE}. Expected a folder written by `dppeft train`."
        ) from error


def load_tokenizer(name: str, pad_token: str | None) -> Any:
    """The tokenizer of a model; an error that says which option helps where it cannot pad."""
    from transformers import AutoTokenizer, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a report on every new head is no news to whoever trains one
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"No model {name!r} can be loaded: {_first_line(error)}") from error
    if pad_token is not None:
        if tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            raise ArgumentError(
                f"--pad-token {pad_token!r} is not in the vocabulary of {name!r}. Name a token "
                "that it has, such as its end token."
            )
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token is None:
        raise ArgumentError(
            f"The tokenizer of {name!r} has no pad token. Name one of its tokens: --pad-token "
            f"'{tokenizer.eos_token or tokenizer.unk_token or '<|endoftext|>'}'."
        )
    return tokenizer


def load_base(name: str, classes: Sequence[str], tokenizer: Any) -> nn.Module:
    """The base model with a new head for ``classes``."""
    from transformers import AutoModelForSequenceClassification

    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=len(classes),
            id2label=dict(enumerate(classes)),
            label2id={label: index for index, label in enumerate(classes)},
        )
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{name!r} cannot be loaded as a classifier: {_first_line(error)}"
        ) from error
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model


def _check_output(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"Output {output} exists and is not empty. Name a new folder.")


def _check_classes(classes: Sequence[str], rows: int) -> None:
    """Class names are shared with the model: a column of measurements would be given away."""
    if len(classes) > max(2, min(100, rows // 2), rows // 10):
        raise DataError(
            f"The label column has {len(classes)} different values in {rows} rows, which are "
            "hardly classes. Name another column with --label; for numbers, bin them first."
        )
    if len(classes) > 2 and all(_is_fraction(name) for name in classes):
        raise DataError(
            "The label column holds numbers with fractions, which are hardly classes, and the "
            "names of classes are shared. Name another column with --label, or bin them first."
        )


def _is_fraction(name: str) -> bool:
    try:
        return not float(name).is_integer()
    except (ValueError, OverflowError):
        return False


def by_size(num_examples: int) -> tuple[int, float]:
    """Expected batch and passes over the rows where none are given.

    An eighth of the rows, at most 1,024, and ten passes. From SST-2's 67,349 rows on both grow with
    the rows, up to six times, so that the sampling rate stays (Li et al. 2022: batch 1,000 and 3
    passes there, 6,000 and 18 on MNLI).
    """
    growth = min(6.0, num_examples / 67_349)
    batch = max(min(1024, num_examples // 8), round(1000 * growth) if growth > 1 else 1)
    return batch, max(10.0, 3 * growth)


def _clipping(settings: TrainSettings) -> str:
    if settings.clipping is None:
        return "automatic" if settings.max_grad_norm is None else "flat"
    return settings.clipping


def _plan(settings: TrainSettings, num_examples: int) -> Any:
    batch, epochs = by_size(num_examples)
    return dppeft.plan(
        num_examples=num_examples,
        batch_size=batch if settings.batch_size is None else settings.batch_size,
        epochs=epochs if settings.epochs is None else settings.epochs,
        epsilon=settings.epsilon,
        delta=min(1e-5, 0.5 / num_examples) if settings.delta is None else settings.delta,
        max_grad_norm=0.1 if settings.max_grad_norm is None else settings.max_grad_norm,
    )


def _fit(
    model: nn.Module,
    dataset: TokenDataset,
    plan: Any,
    settings: TrainSettings,
    *,
    tokenizer: Any,
    progress: Progress,
) -> Any:
    """All planned steps with Adam; a new head takes a larger rate than a pretrained encoder."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    head = [p for name, p in named if "modules_to_save" in name]
    rest = [p for name, p in named if "modules_to_save" not in name]
    groups = [{"params": head, "lr": settings.head_lr}, {"params": rest, "lr": settings.lr}]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / plan.steps)
    model.train()
    run = dppeft.make_private(
        model,
        optimizer,
        dataset,
        plan,
        collate_fn=collator_for(tokenizer),
        clipping=_clipping(settings),
        **settings.engine_options,
    )
    for step, batch in enumerate(run.batches(), start=1):
        run.step(batch)
        schedule.step()
        progress(step, plan)
    return run


def _load(adapter: Path, note: Mapping[str, Any], model: str | None) -> tuple[nn.Module, Any]:
    """The tuned model and its tokenizer."""
    name = model or note["base_model"]
    tokenizer = load_tokenizer(name, note.get("pad_token"))
    return dppeft.load(load_base(name, note["classes"], tokenizer), adapter), tokenizer


@torch.inference_mode()
def _logits(model: nn.Module, table: TextTable, tokenizer: Any, max_length: int) -> Tensor:
    """(N, C), in the order of the rows; equal lengths together, so little padding."""
    rows, _ = tokenize_rows(tokenizer, table.texts, table.pairs, max_length=max_length)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    collate = collator_for(tokenizer)
    model.eval()
    device = next(model.parameters()).device
    pieces = []
    for start in range(0, len(order), 64):
        batch = collate([rows[i] for i in order[start : start + 64]])
        output = model(**{name: value.to(device) for name, value in batch.items()})
        pieces.append(output.logits.float().cpu())
    by_length = torch.cat(pieces)
    return torch.empty_like(by_length).index_copy_(0, torch.tensor(order), by_length)


def _scores(logits: Tensor, labels: Sequence[int]) -> dict[str, Any]:
    right = sum(int(a == b) for a, b in zip(logits.argmax(dim=1).tolist(), labels, strict=True))
    commonest = max(labels.count(label) for label in set(labels))
    total = len(labels)
    return {"accuracy": right / total, "majority": commonest / total, "rows": total}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
