"""The way of a classification task: rows, plan, training, report, export, a new process."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tasks.settings import (
    Settings,
    check_before_loading,
    command_of,
    model_name,
    stated_epsilon,
)

if TYPE_CHECKING:
    from tasks.common import Rows, Task
    from tasks.objectives import Objective
    from tasks.training import Fit

SENTENCES = (
    "a joy from start to finish , warm , funny and beautifully acted .",
    "two hours of my life that i will never get back .",
)
PAIRS = (
    "A man plays the guitar on a stage. | A man makes music.",
    "A man plays the guitar on a stage. | The stage is empty.",
)


def run_task(settings: Settings) -> None:
    """The whole way: rows, plan, training, report, export, a new process that reads it back."""
    check_before_loading(settings)
    from accelerate import Accelerator
    from transformers import logging

    from tasks.reporting import write_figures
    from tasks.training import without_privacy

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.set_verbosity_error()  # each loading would report the head that is new
    accelerator = Accelerator()
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True, highlight=False)
    work = Work.of(settings, console, {**settings.engine_options, "accelerator": accelerator})
    print_plan(console, settings, work)
    model, done = work.train(work.plan, "private")
    console.print(
        f"trained {work.plan.steps} steps: {done.seconds:.0f} s with the adapter in place, "
        f"{done.examples_per_second:.0f} examples/s"
    )
    private = f"private {settings.method}"
    models, fits = {private: model}, {private: done}
    if settings.compare:
        other, done_without = work.train(without_privacy(work.plan), "without privacy")
        models["the same recipe without privacy"] = other
        fits["the same recipe without privacy"] = done_without
    if settings.objective == "infilling":  # no new layer: the model answers before it is trained
        models["zero-shot"] = work.objective.build().to(next(model.parameters()).device)
    scores = [work.report(rows, models, work.plan) for rows in work.task.evaluation]
    if accelerator.is_main_process:
        paired = work.task.train.pairs is not None
        size = share(console, settings, model, done.run, paired=paired)
        if settings.result is not None:
            write_figures(
                settings.result,
                command=command_of(settings),
                task=work.task,
                method=settings.method,
                epsilon=stated_epsilon(work.plan),
                delta=work.plan.delta,
                model_name=model_name(settings),
                fits=fits,
                scores=scores,
                model=model,
                size=size,
                recipe=settings.paper,
            )
    accelerator.wait_for_everyone()


def load_task(settings: Settings, folder: str) -> Task:
    """The task, with what the command line changes and what the model in ``folder`` allows."""
    from tasks.classifier import stated_pooling
    from tasks.training import with_settings

    task = importlib.import_module(f"tasks.{settings.task}").load(settings.data)
    infilling = settings.objective == "infilling"
    warms_up = not infilling and stated_pooling(Path(folder)) is not None
    return dataclasses.replace(
        task,
        name=f"{task.name}, infilling" if infilling else task.name,
        recipe=with_settings(
            task.recipe.for_method(settings.method),
            # A warm start needs a head that reads nothing but the encoder's features.
            **{**settings.recipe, **({} if warms_up else {"head_steps": 0})},
        ),
        train=task.train.select(range(min(settings.rows or len(task.train), len(task.train)))),
    )


@dataclass(kw_only=True)
class Work:
    """What training and reporting share."""

    console: Console
    task: Task
    objective: Objective
    plan: Any
    tokens: Any
    cut: int  # rows that lost tokens; private
    dataset: Any
    method: str
    engine_options: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # of dppeft.wrap
    features: Any = None  # of the private rows under the frozen encoder, once they are needed

    @classmethod
    def of(cls, settings: Settings, console: Console, engine_options: dict[str, Any]) -> Work:
        """All that is known before a run: rows, tokens, plan. Nothing is spent."""
        from transformers import AutoTokenizer

        import dppeft
        from dppeft.text import TokenDataset
        from tasks.common import demo_encoder
        from tasks.objectives import make_objective

        folder = settings.model or str(demo_encoder())
        task = load_task(settings, folder)
        about = importlib.import_module(f"tasks.{settings.task}")
        objective = make_objective(
            settings.objective,
            folder,
            AutoTokenizer.from_pretrained(folder),
            classes=task.classes,
            template=settings.template or about.TEMPLATE,
            label_words=settings.label_words or about.LABEL_WORDS,
        )
        plan = dppeft.plan(
            num_examples=len(task.train),
            batch_size=task.recipe.batch_size,
            steps=task.recipe.steps(len(task.train)),
            epsilon=settings.epsilon,
            noise_multiplier=settings.noise_multiplier,
            accountant=settings.accountant,
            delta=settings.delta,
            max_grad_norm=task.recipe.max_grad_norm,
        )
        tokens, cut = objective.encode(task.train, task.recipe)
        work = cls(
            console=console,
            task=task,
            objective=objective,
            plan=plan,
            tokens=tokens,
            cut=cut,
            dataset=TokenDataset(tokens, task.train.labels),
            method=settings.method,
            options=settings.options,
            engine_options=engine_options,
        )
        work.wrap(objective.build())  # what does not fit is refused before a plan is shown
        return work

    def wrap(self, base: Any) -> Any:
        """A base model with the method in place; an error where the two do not fit."""
        import dppeft
        from tasks.training import adapted_layers

        options = {**adapted_layers(base, self.method, self.task.recipe), **self.options}
        model = dppeft.wrap(base, self.method, **options)
        self.objective.prepare(model)
        return model

    def train(self, plan: Any, title: str) -> tuple[Any, Fit]:
        """A fresh model, trained by the plan."""
        from tasks.reporting import progress_bar
        from tasks.training import fit
        from tasks.warm_start import frozen_features, part_of, warm_start

        recipe, objective = self.task.recipe, self.objective
        base = objective.build()
        ledger = {}
        if recipe.head_steps:
            with self.console.status(f"{title}: warm start of the head on frozen features"):
                if self.features is None:  # once for all runs: the encoder is the same
                    self.features = frozen_features(base, self.tokens, objective.tokenizer)
                labels = self.task.train.labels
                warm = warm_start(
                    base, self.features, labels, plan, recipe, options=self.engine_options
                )
            if warm.run.ledger is not None:  # the main process writes
                ledger = {"ledger": warm.run.ledger.path}
        model = self.wrap(base)
        with progress_bar(self.console, plan, title) as progress:
            done = fit(
                model,
                self.dataset,
                part_of(plan, plan.steps - recipe.head_steps),
                recipe,
                tokenizer=objective.tokenizer,
                loss=objective.loss(model, recipe),
                progress=lambda step: progress(recipe.head_steps + step),
                options={**self.engine_options, **ledger},
            )
        return model, done

    def accuracy(self, model: Any, rows: Rows) -> float:
        """Of a trained model, on rows that it was not trained on."""
        from tasks.classifier import predict
        from tasks.training import accuracy

        tokens, _ = self.objective.encode(rows, self.task.recipe)
        logits_of, tokenizer = self.objective.logits, self.objective.tokenizer
        return accuracy(predict(model, tokens, tokenizer, logits_of=logits_of), rows.labels)

    def report(self, rows: Rows, models: dict[str, Any], plan: Any) -> dict[str, float]:
        """The first model's accuracy on its own line, and a table beside what is simpler."""
        from tasks.training import majority_accuracy, words_accuracy

        scores = {name: self.accuracy(model, rows) for name, model in models.items()}
        words = words_accuracy(
            self.task.train,
            rows,
            classes=len(self.task.classes),
            plan=plan,
            options=self.engine_options,
        )
        table = Table("on " + rows.name, "accuracy")
        table.add_row("majority class", f"{majority_accuracy(rows.labels):.3f}")
        table.add_row("private bag of words, same epsilon", f"{words:.3f}")
        for name, score in scores.items():
            table.add_row(name, f"{score:.3f}")
        self.console.print(table)
        self.console.print(
            "The bag of words had a budget of its own on the same rows: whoever publishes both has "
            "spent both."
        )
        main_score = next(iter(scores.values()))
        self.console.print(f"accuracy: {main_score:.3f} on {len(rows)} {rows.name}")
        return scores


def print_plan(console: Console, settings: Settings, work: Work) -> None:
    """All that will be spent, and on what, before it is."""
    task, recipe = work.task, work.task.recipe
    console.print(f"[bold]{task.name}[/bold]: {len(task.train)} private rows ({task.train.name})")
    console.print(
        f"method {settings.method}, clipping {recipe.clipping}, {recipe.max_length} tokens a row, "
        f"learning rates {recipe.lr:g} (adapter) and {recipe.head_lr:g} (head)"
    )
    if recipe.head_steps:
        console.print(
            f"the first {recipe.head_steps} steps train the head alone, on features that the "
            "encoder computes once"
        )
    console.print(work.plan.explain())
    console.print(f"rows cut to {recipe.max_length} tokens: {work.cut} (not private, for you only)")


def share(
    console: Console, settings: Settings, model: Any, run: Any, *, paired: bool = False
) -> int:
    """Export, say what is shared under which guarantee, read it back in a new process.

    Returns:
        The bytes shared.
    """
    import dppeft
    from tasks.reporting import in_a_new_process

    spent = run.spent()
    dppeft.export(model, settings.output, spent=run.card())
    size = sum(path.stat().st_size for path in settings.output.rglob("*") if path.is_file())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    console.print(
        f"shared: {size:,} bytes in {settings.output} (the model: {whole:,}), under "
        f"({spent.epsilon:.2f}, {spent.delta:g})-DP for {spent.unit} ({spent.accountant}, "
        f"{spent.steps} steps)"
    )
    read_back = [settings.task, str(settings.output), "--objective", settings.objective]
    read_back += ["--model", settings.model] if settings.model else []
    read_back += ["--template", settings.template] if settings.template else []
    for word in settings.label_words or ():
        read_back += ["--label-word", word]
    sentences = settings.sentences or (PAIRS if paired else SENTENCES)
    printed = in_a_new_process("tasks.predict", *read_back, "--", *sentences)
    console.print("read back in a new process with peft.PeftModel.from_pretrained:")
    console.print(printed, end="", markup=False)
    return size
