"""Each recipe is read, plans what its paper spends, and takes a private step on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dppeft
from dppeft.errors import ArgumentError, DataError
from tasks import recipes
from tasks.common import Recipe
from tasks.recipes import PaperRecipe
from tasks.settings import Settings, with_paper
from tasks.training import make_optimizer, with_settings
from tests import tiny

ALL = [recipes.recipe(name) for name in recipes.names()]
WITH_CHECKS = [one for one in ALL if one.checks]
# A method's plan does not depend on the model: one recipe for each set of privacy numbers.
PLANS = {
    (o.num_examples, o.batch_size, o.epochs, o.steps, o.epsilon, o.noise_multiplier, o.delta): o
    for o in WITH_CHECKS
}


def test_there_are_recipes_of_every_paper_and_names_are_as_documented() -> None:
    assert recipes.recipe("yu2022-lora-roberta-large-mnli").model == "roberta-large"
    prefixes = {name.split("-")[0] for name in recipes.names()}
    assert prefixes == {"li2022", "yu2022", "yu2021", "anil2021", "ours"}
    assert len(WITH_CHECKS) > 60


@pytest.mark.parametrize("one", PLANS.values(), ids=lambda o: o.name)
@pytest.mark.filterwarnings("ignore:delta=:dppeft.errors.PrivacyWarning")
def test_the_plan_gives_the_papers_numbers(one: PaperRecipe) -> None:
    plan = one.plan()
    for check in one.checks:
        if check.noise_multiplier is not None:
            assert plan.noise_multiplier == pytest.approx(check.noise_multiplier, rel=0.02)
            continue
        found = dppeft.epsilon(
            sample_rate=plan.sample_rate,
            noise_multiplier=plan.noise_multiplier,
            steps=plan.steps,
            delta=check.delta or one.delta,
            accountant=check.accountant or one.accountant,
        )
        assert found == pytest.approx(check.epsilon, rel=0.02)


# One of each combination that the step could fail on; the sizes of the models play no part.
STEPS = {(o.model[:5], o.method, o.objective, o.clipping, str(o.options)): o for o in ALL}


def tiny_model(one: PaperRecipe) -> tuple[str, nn.Module]:
    if one.model.startswith("wrn"):
        from tasks.vision import WideResNet

        return "images", WideResNet(depth=10, width=1, num_labels=10, channels=3)
    if one.model.startswith("gpt2"):
        return "gpt2", tiny.build("gpt2")
    if one.objective in ("mlm", "infilling"):
        return "roberta-mlm", tiny.build("roberta-mlm")
    return "roberta", tiny.build("roberta")


@pytest.mark.parametrize("one", STEPS.values(), ids=lambda o: o.name)
def test_a_private_step_on_a_tiny_model(one: PaperRecipe, tmp_path: Path) -> None:
    """Method, options and clipping are ones that dppeft takes, on a model of the same kind."""
    name, base = tiny_model(one)
    options = dict(one.options)
    if "r" in options:
        options["r"] = min(options["r"], 2)
    if "bottleneck" in options:
        options["bottleneck"] = 8
    model = dppeft.wrap(base, one.method, **options)
    plan = dppeft.plan(
        num_examples=8,
        batch_size=4,
        steps=2,
        noise_multiplier=1.0,
        delta=1e-3,
        max_grad_norm=one.max_grad_norm,
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    recipe = with_settings(Recipe(lr=one.lr, head_lr=one.lr), betas=tuple(one.betas))
    optimizer, _ = make_optimizer(model, recipe, 10)
    run = dppeft.make_private(
        model, optimizer, Rows(name), plan, clipping=one.clipping, ledger=tmp_path / "ledger"
    )
    for batch in run.batches():
        run.step(batch)
    assert run.spent().steps == 2
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())


class Rows(torch.utils.data.Dataset):
    def __init__(self, name: str) -> None:
        if name == "images":
            generator = torch.Generator().manual_seed(0)
            images = torch.randn(8, 3, 8, 8, generator=generator)
            self.rows: list[dict[str, Any]] = [
                {"pixel_values": image, "labels": i % 10} for i, image in enumerate(images)
            ]
            return
        batch = tiny.make_batch(name, batch_size=8, lengths=[6] * 8)
        self.rows = [{n: v[i].tolist() for n, v in batch.items()} for i in range(8)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


# --- from a recipe to a run -----------------------------------------------------------------------


def settings(**changes: Any) -> Settings:
    fields = {
        "task": "mnli",
        "method": "lora",
        "epsilon": 8.0,
        "delta": 1e-5,
        "compare": False,
        "data": None,
        "model": None,
        "output": Path("x"),
        "sentences": (),
        "rows": None,
        "recipe": {"epochs": None, "lr": None},
    }
    return Settings(**{**fields, **changes})


def test_a_recipe_fills_in_what_the_command_line_does_not_say() -> None:
    name = "yu2022-lora-roberta-large-mnli"
    filled = with_paper(settings(), name, method=None, epsilon=None)
    assert (filled.method, filled.model, filled.delta) == ("lora", "roberta-large", 1e-6)
    assert (filled.epsilon, filled.noise_multiplier) == (None, 0.73)
    assert filled.recipe["epochs"] == 50
    assert filled.options["r"] == 16
    changed = settings(recipe={"epochs": 2.0, "lr": None}, model="other")
    other = with_paper(changed, name, method="adapter", epsilon=3.0)
    assert (other.method, other.model, other.options) == ("adapter", "other", {})
    assert (other.epsilon, other.noise_multiplier, other.recipe["epochs"]) == (3.0, None, 2.0)
    with pytest.raises(ArgumentError, match="is for mnli, not for sst2. Start it with"):
        with_paper(settings(task="sst2"), name, method=None, epsilon=None)
    with pytest.raises(ArgumentError, match="Did you mean 'yu2022-lora-roberta-large-mnli'"):
        with_paper(settings(), "yu2022-lora-roberta-large-mnl", method=None, epsilon=None)


def test_every_recipe_of_a_classifier_fits_the_tasks_settings() -> None:
    for one in ALL:
        if one.task in ("sst2", "mnli", "qnli", "qqp"):
            assert with_settings(Recipe(), **one.training()).lr == one.lr
    with pytest.raises(ArgumentError, match="is no recipe of a classifier or of texts"):
        recipes.recipe("anil2021-full-bert-large-mlm-1m").training()


def test_warm_up_then_fall() -> None:
    model = dppeft.wrap(tiny.build("bert"), "head")
    optimizer, schedule = make_optimizer(model, Recipe(head_lr=1.0, warmup=0.2), 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1 - k / 8 for k in range(8)]])
    optimizer, schedule = make_optimizer(model, Recipe(head_lr=1.0, schedule="constant"), 10)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_file_with_a_fault_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("axes = [", "no recipes: TOMLDecodeError"),
        ('prefix = "x"\nsource = "y"\naxes = ["task"]\n[task.a]\nlr = 1.0\n', "missing"),
        ('prefix = "x"\nsource = "y"\naxes = ["task"]\n[task.a]\nrate = 1.0\n', r"'rate'"),
        (
            'prefix = "x"\nsource = "y"\naxes = ["task"]\n[task.a]\n[[check]]\ntask = "b"\n',
            "is of no recipe",
        ),
    ):
        path = tmp_path / "x.toml"
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            list(recipes.read(path))
