"""Train, evaluate and use a text classifier from a table of rows: what the command line does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppeft import _validate
from dppeft.errors import ArgumentError, CheckpointError
from dppeft.tables import TextTable, class_numbers, classes_of, text_table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """A training run of the command line. ``batch_size`` is the expected logical batch."""

    data: Path
    columns: Columns
    model: str
    output: Path
    epsilon: float
    method: str = "lora"
    delta: float | None = None  # None: min(1e-5, 1 / (2 N))
    epochs: float = 10.0
    batch_size: int | None = None  # None: N / 8, at most 1,024
    lr: float = 5e-4
    head_lr: float = 5e-3
    max_length: int = 128
    max_grad_norm: float = 0.1
    pad_token: str | None = None
    eval_data: Path | None = None
    method_options: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)


def train(settings: TrainSettings, *, say: Say, progress: Progress) -> dict[str, Any]:
    """Train privately and write adapter, head, privacy card and note to ``settings.output``.

    Everything that can be refused is refused before the model is loaded.

    Returns:
        What a program would read: epsilon, delta, steps, output, bytes, and accuracy on
        ``eval_data`` where given.
    """
    if settings.output.exists() and (
        not settings.output.is_dir() or any(settings.output.iterdir())
    ):
        raise ArgumentError(f"Output {settings.output} is not empty. Name a new folder.")
    table = settings.columns.read(settings.data)
    classes = classes_of(table.labels or ())
    labels = class_numbers(table.labels or (), classes)
    evaluation = None if settings.eval_data is None else settings.columns.read(settings.eval_data)
    if evaluation is not None:
        class_numbers(evaluation.labels or (), classes)
    plan = _plan(settings, len(table))
    _validate.positive(lr=settings.lr)
    _validate.positive(head_lr=settings.head_lr)
    say(plan.explain())

    import dppeft

    tokenizer = _tokenizer(settings.model, settings.pad_token)
    model = _base_model(settings.model, classes, tokenizer)
    wrapped = dppeft.wrap(model, settings.method, **settings.method_options)
    dataset = _EncodedRows(_encode(table, tokenizer, settings.max_length, say=say), labels)
    run = _fit(wrapped, dataset, plan, settings, tokenizer=tokenizer, progress=progress)

    card = run.card()
    seen = [*card.looked_at_without_noise, "the names of the classes in the label column"]
    dppeft.export(
        wrapped, settings.output, spent=dataclasses.replace(card, looked_at_without_noise=seen)
    )
    note = {"classes": classes, "max_length": settings.max_length, "base_model": settings.model}
    note |= {"pad_token": settings.pad_token, "columns": dataclasses.asdict(settings.columns)}
    (settings.output / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    result = {**dataclasses.asdict(run.spent()), "output": str(settings.output)}
    result["bytes"] = sum(f.stat().st_size for f in settings.output.rglob("*") if f.is_file())
    if evaluation is not None:
        logits = _logits(wrapped, _encode(evaluation, tokenizer, settings.max_length), tokenizer)
        result |= _scores(logits, class_numbers(evaluation.labels or (), classes))
    return result


def evaluate(
    adapter: Path, data: Path, columns: Columns, *, model: str | None = None
) -> dict[str, Any]:
    """Accuracy of a shared adapter on labelled rows, beside that of the commonest class."""
    note = read_note(adapter)
    table = columns.read(data)
    labels = class_numbers(table.labels or (), note["classes"])
    tuned, tokenizer = _load(adapter, note, model)
    return _scores(_logits(tuned, _encode(table, tokenizer, note["max_length"]), tokenizer), labels)


def predict(adapter: Path, table: TextTable, *, model: str | None = None) -> list[dict[str, Any]]:
    """Class and probability of each row."""
    note = read_note(adapter)
    tuned, tokenizer = _load(adapter, note, model)
    logits = _logits(tuned, _encode(table, tokenizer, note["max_length"]), tokenizer)
    best = logits.softmax(dim=1).max(dim=1)
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
    path = adapter / NOTE
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        return {key: note[key] for key in ("classes", "max_length", "base_model", "columns")} | note
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{adapter} has no readable {NOTE}. Expected a folder written by `dppeft train`."
        ) from error


def _plan(settings: TrainSettings, num_examples: int) -> Any:
    import dppeft

    default_batch = max(1, min(1024, num_examples // 8))
    return dppeft.plan(
        num_examples=num_examples,
        batch_size=default_batch if settings.batch_size is None else settings.batch_size,
        epochs=settings.epochs,
        epsilon=settings.epsilon,
        delta=min(1e-5, 0.5 / num_examples) if settings.delta is None else settings.delta,
        max_grad_norm=settings.max_grad_norm,
    )


def _tokenizer(name: str, pad_token: str | None) -> Any:
    from transformers import AutoTokenizer

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
        end = tokenizer.eos_token or "<|endoftext|>"
        raise ArgumentError(
            f"The tokenizer of {name!r} has no pad token. Pass --pad-token '{end}'."
        )
    return tokenizer


def _base_model(name: str, classes: Sequence[str], tokenizer: Any) -> Any:
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


def _encode(
    table: TextTable, tokenizer: Any, max_length: int, *, say: Say | None = None
) -> list[dict[str, list[int]]]:
    """Token ids of each row, cut to ``max_length``; says how many were, which is private."""
    pairs = None if table.pairs is None else list(table.pairs)
    full = tokenizer(list(table.texts), pairs, truncation=True, max_length=max_length)
    if say is not None:
        cut = sum(len(ids) == max_length for ids in full["input_ids"])
        if cut:
            say(f"{cut} rows were cut to {max_length} tokens (not private: for you only)")
    names = list(full)
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(full[name] for name in names), strict=True)
    ]


class _EncodedRows:
    """Rows by index, as a collator takes them."""

    def __init__(self, encoded: Sequence[dict[str, list[int]]], labels: Sequence[int]) -> None:
        self._encoded, self._labels = encoded, labels

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._encoded[index], "labels": self._labels[index]}


def _fit(
    model: torch.nn.Module,
    dataset: _EncodedRows,
    plan: Any,
    settings: TrainSettings,
    *,
    tokenizer: Any,
    progress: Progress,
) -> Any:
    """All planned steps with Adam; a new head takes a larger rate than a pretrained encoder."""
    import torch
    from transformers import DataCollatorWithPadding

    import dppeft

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
        collate_fn=DataCollatorWithPadding(tokenizer),
        **settings.engine_options,
    )
    for step, batch in enumerate(run.batches(), start=1):
        run.step(batch)
        schedule.step()
        progress(step, plan)
    return run


def _load(adapter: Path, note: Mapping[str, Any], model: str | None) -> tuple[Any, Any]:
    """The tuned model and its tokenizer."""
    import dppeft

    name = model or note["base_model"]
    tokenizer = _tokenizer(name, note.get("pad_token"))
    base = _base_model(name, note["classes"], tokenizer)
    return dppeft.load(base, adapter), tokenizer


def _logits(
    model: torch.nn.Module, encoded: Sequence[dict[str, list[int]]], tokenizer: Any
) -> Tensor:
    """(N, C), in the order of the rows; equal lengths together, so little padding."""
    import torch

    model.eval()
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
    pieces = []
    with torch.inference_mode():
        for start in range(0, len(order), 64):
            chosen = [encoded[i] for i in order[start : start + 64]]
            pieces.append(model(**tokenizer.pad(chosen, return_tensors="pt")).logits.float())
    by_length = torch.cat(pieces)
    return torch.empty_like(by_length).index_copy_(0, torch.tensor(order), by_length)


def _scores(logits: Tensor, labels: Sequence[int]) -> dict[str, Any]:
    right = sum(int(a == b) for a, b in zip(logits.argmax(dim=1).tolist(), labels, strict=True))
    commonest = max(labels.count(label) for label in set(labels))
    total = len(labels)
    return {"accuracy": right / total, "majority": commonest / total, "rows": total}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
