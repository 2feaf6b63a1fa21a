"""What recipes there are, and what each would spend.

python -m tasks.recipes [PART OF A NAME]
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tasks import recipes

app = typer.Typer(add_completion=False)


@app.command()
def main(part: Annotated[str, typer.Argument(help="Only names that hold this.")] = "") -> None:
    """A table of the recipes; with their plans where few are asked for."""
    chosen = [recipes.recipe(name) for name in recipes.names() if part in name]
    if not chosen:
        typer.echo(f"Error: no recipe's name holds {part!r}.", err=True)
        raise typer.Exit(2)
    table = Table("recipe", "rows", "batch", "lr", "clip", "noise", "epsilon")
    table.columns[0].no_wrap = True
    for one in chosen:
        cells = [one.name, f"{one.num_examples:,}", f"{one.batch_size:,}", f"{one.lr:g}"]
        cells += [f"{one.max_grad_norm:g}"]
        if len(chosen) <= 8:
            plan = one.plan()
            cells += [f"{plan.noise_multiplier:.3f}", f"{plan.epsilon():.2f} ({one.accountant})"]
        else:
            cells += [f"{one.noise_multiplier or ''}", f"{one.epsilon or ''}"]
        table.add_row(*cells)
    console = Console()
    # A name that is cut cannot be copied.
    Console(width=max(console.width, 60 + max(len(one.name) for one in chosen))).print(table)


if __name__ == "__main__":
    app()
