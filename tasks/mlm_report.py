"""What is said and kept of a masked-language run: accuracy, signal over noise, the shared model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import dppeft
from dppeft.optimizers import mean_ratio
from tasks.masked_lm import Texts, visited
from tasks.results import Result
from tasks.training import Fit

if TYPE_CHECKING:
    from tasks.mlm import Settings


def report(
    console: Console, trained: dict[str, tuple[Any, Fit, float]], baseline: float, texts: int
) -> None:
    """The share of masked tokens that each model names."""
    table = Table(f"on {texts} held-out texts", "masked-token accuracy", "seconds", "examples/s")
    table.add_row("always the commonest token", f"{baseline:.3f}", "", "")
    for name, (_, done, value) in trained.items():
        speed = visited(done.run.plan) / max(done.seconds, 1e-9)
        table.add_row(name, f"{value:.3f}", f"{done.seconds:.0f}", f"{speed:.0f}")
    console.print(table)
    for name, (_, done, _) in trained.items():
        if done.signal and done.run.plan.noise_multiplier:
            print_signal(console, name, done.signal)


def print_signal(console: Console, name: str, records: Sequence[Any]) -> None:
    """Signal over noise in each fifth of the run, estimated from released gradients alone."""
    size = max(1, len(records) // 5)
    parts = [records[i : i + size] for i in range(0, len(records), size)][:5]
    shown = ", ".join(f"{mean_ratio(part):.3f}" for part in parts)
    console.print(f"{name}: signal over noise by fifths of the run: {shown} (costs no privacy)")


def share(console: Console, settings: Settings, model: Any, run: Any, tokenizer: Any) -> int:
    """Model, card and tokenizer into the output folder; the bytes of it."""
    card = run.card()
    if settings.public:
        card = card.without_guarantee("Trained without privacy, on text declared public.")
    dppeft.export(model, settings.output, spent=card)
    tokenizer.name_or_path = ""  # where it was loaded from is nobody's business
    tokenizer.save_pretrained(settings.output)
    size = sum(path.stat().st_size for path in settings.output.rglob("*") if path.is_file())
    claim = "no guarantee"
    if card.guarantee:
        claim = f"({card.epsilon:.2f}, {card.delta:g})-DP for {card.unit}"
    console.print(
        f"saved: {size:,} bytes in {settings.output}, {claim}. Read it with "
        "transformers.AutoModelForMaskedLM.from_pretrained."
    )
    return size


def figures(
    settings: Settings, texts: Texts, trained: dict[str, tuple[Any, Fit, float]], size: int
) -> list[Result]:
    """One result for each run, the shared one first."""
    results = []
    growth = "" if settings.public else f"{settings.schedule} batches"
    for name, (model, done, value) in trained.items():
        plan = done.run.plan
        label = f"BERT, {settings.layers} layers of width {settings.width}"
        if settings.model or settings.body != "new":
            label = Path(settings.model).name if settings.model else "MiniLM-L6"
        results.append(
            Result(
                task=f"mlm ({texts.name})",
                model=label,
                method=f"full, {growth}" if growth else "full",
                epsilon=plan.target_epsilon if name == "private" else None,
                delta=plan.delta if name == "private" else None,
                metric="masked-token accuracy",
                value=value,
                trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
                examples_per_second=visited(plan) / max(done.seconds, 1e-9),
                seconds=done.seconds,
                private_rows=0 if settings.public else len(texts.train),
                command=settings.command,
                bytes_shared=size if not results else None,
                seed=settings.seed,
                recipe=settings.recipe,
                note="text declared public" if settings.public else "",
            )
        )
    return results
