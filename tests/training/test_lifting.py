"""What the optimizer moves in the place of what is trained, in runs and in trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dppeft
from dppeft.training.lifting import Lift
from tests.training import runs
from tests.training.trainers import StopAfter, make, saving


def test_without_carriers_nothing_is_exchanged() -> None:
    model = runs.adapted_bert()
    lift = Lift(model, runs.trained(model))
    optimizer = runs.sgd(model)
    before = [id(p) for group in optimizer.param_groups for p in group["params"]]
    lift.exchange(optimizer)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == before
    assert lift.moved == runs.trained(model) == lift.kept
    released = {name: torch.zeros_like(p) for name, p in runs.trained(model).items()}
    assert lift(released).keys() == released.keys()


def test_carriers_are_exchanged_once_and_everything_else_stays() -> None:
    model = runs.carried_bert()
    trained = runs.trained(model)
    lift = Lift(model, trained)
    optimizer = runs.sgd(model)
    for _ in range(2):
        lift.exchange(optimizer)
        (group,) = optimizer.param_groups
        assert {id(p) for p in group["params"]} == {id(p) for p in lift.moved.values()}
    heads = [name for name in trained if ".rgp_" not in name]
    assert heads
    assert set(heads) <= lift.moved.keys()
    assert all(".rgp_carriers." not in name for name in lift.moved)
    assert sum("basis_" in name for name in lift.kept) == 2 * sum("rgp_" in n for n in lift.moved)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_shares_and_resumes_rgp(tmp_path: Path) -> None:
    straight = make(tmp_path / "a", model=runs.carried_bert(), privacy={"seed": 1})
    straight.train()
    first = saving(
        tmp_path / "b", model=runs.carried_bert(), privacy={"seed": 1}, callbacks=[StopAfter(3)]
    )
    first.train()
    again = make(tmp_path / "c", model=runs.carried_bert(), privacy={"seed": 1})
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    for name, value in runs.full_matrices(straight.model).items():
        torch.testing.assert_close(runs.full_matrices(again.model)[name], value)
    moved = [n for n in runs.full_matrices(straight.model) if "rgp_weight" in n]
    start = runs.full_matrices(runs.carried_bert())
    assert all(not torch.equal(start[n], runs.full_matrices(straight.model)[n]) for n in moved)
    straight.save_model(str(tmp_path / "shared"))
    loaded = dppeft.load(runs.build("bert"), tmp_path / "shared")
    for name in moved:
        assert torch.equal(
            runs.full_matrices(loaded)[name], runs.full_matrices(straight.model)[name]
        )


def test_a_weight_that_was_exchanged_behind_the_run_is_noticed() -> None:
    model = runs.carried_bert()
    plan = runs.make_plan(8, steps=2)
    run = dppeft.make_private(model, runs.sgd(model), runs.token_rows(8), plan, precision="float32")
    layer = next(m for m in model.modules() if hasattr(m, "rgp_weight"))
    layer.rgp_weight["default"] = torch.nn.Parameter(
        layer.rgp_weight["default"].detach().clone(), requires_grad=False
    )
    with pytest.raises(dppeft.DppeftError, match="no longer what the run was made to train"):
        run.step(next(run.batches()))
    assert run.spent().steps == 0


def test_every_engine_and_clipping_trains_rgp(tmp_path: Path) -> None:
    for engine in ("auto", "opacus"):
        for clipping in ("flat", "per_layer", "automatic"):
            model = runs.carried_bert()
            run = dppeft.make_private(
                model,
                runs.sgd(model, lr=0.1),
                runs.token_rows(8),
                runs.make_plan(8, steps=2, noise_multiplier=1.0, max_grad_norm=0.5),
                precision="float32",
                engine=engine,
                clipping=clipping,
                ledger=tmp_path / f"{engine}-{clipping}.jsonl",
            )
            assert run.preflight.worst_error < 1e-4
            for batch in run.batches():
                run.step(batch)
            assert run.spent().steps == 2
