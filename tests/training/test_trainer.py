"""PrivateTrainer: Trainer's ways, the plan's steps, public logs, and refusals by name."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer, DataCollatorWithPadding, EarlyStoppingCallback, Trainer

import dppeft
from tests.training.runs import adapted_bert, trained, values
from tests.training.trainers import HELD_OUT, ROWS, Watch, accuracy, arguments, make


def test_the_seam_in_transformers_is_where_it_was() -> None:
    """The methods that are replaced exist and take what they took."""
    seam = {
        "_run_epoch": [
            "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch",
            "trial", "ignore_keys_for_eval", "start_time", "resume_from_checkpoint",
            "epochs_trained", "steps_trained_in_current_epoch",
        ],
        "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
        "_finalize_training": ["trial", "num_train_samples", "start_time"],
        "set_initial_training_values": ["args", "dataloader"],
        "get_train_dataloader": [],
        "_maybe_log_save_evaluate": [
            "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval",
            "start_time", "learning_rate",
        ],
        "_save": ["output_dir", "state_dict"],
        "_save_checkpoint": ["model", "trial"],
        "_save_optimizer_and_scheduler": ["output_dir"],
        "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
        "log": ["logs", "start_time"],
    }  # fmt: skip
    for name, expected in seam.items():
        method = getattr(Trainer, name, None)
        found = list(inspect.signature(method).parameters)[1:] if method else None
        assert found == expected, (
            f"transformers {transformers.__version__} moved Trainer.{name}: look at "
            "dppeft/training/trainer.py and saving.py again"
        )


def test_a_trainer_that_trains_by_itself_would_be_stopped(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(NotImplementedError, match="would use private rows without noise"):
        trainer.training_step(trainer.model, {})
    with pytest.raises(dppeft.DppeftError, match="no training batches to iterate over"):
        next(iter(trainer.get_train_dataloader()))


def test_A1_epochs_become_the_plans_steps(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy={"epsilon": 8.0, "noise_multiplier": None})
    output = trainer.train()
    assert trainer.plan.steps == 6
    assert output.global_step == trainer.state.max_steps == trainer.spent().steps == 6
    assert trainer.spent().epsilon == pytest.approx(trainer.plan.epsilon())
    assert trainer.spent().epsilon <= 8.0
    assert trainer.state.epoch == 2.0
    with pytest.raises(dppeft.DppeftError, match="6 of 6 planned steps are made, and 1 more"):
        trainer.train()
    assert trainer.spent().steps == 6


def test_A1_max_steps_counts_updates(tmp_path: Path) -> None:
    trainer = make(tmp_path, args={"max_steps": 4})
    assert trainer.train().global_step == trainer.spent().steps == 4


def test_fractions_of_epochs_are_exact(tmp_path: Path) -> None:
    trainer = make(tmp_path, args={"num_train_epochs": 1.5}, privacy={"batch_size": 7})
    assert trainer.train().global_step == trainer.plan.steps == math.ceil(1.5 * 24 / 7)


def test_B18_the_trainer_makes_the_updates_of_a_plain_loop(tmp_path: Path) -> None:
    """No noise, nothing clipped, all rows in each draw; AdamW, linear schedule with warm-up."""
    privacy = {"noise_multiplier": 0.0, "max_grad_norm": 1e9, "batch_size": 24}
    args = {"max_steps": 8, "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.01}
    trainer = make(tmp_path, privacy={**privacy, "precision": "float32"}, args=args)
    trainer.train()
    plain = adapted_bert()
    optimizer = torch.optim.AdamW(trained(plain).values(), lr=1e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)
    batch = trainer.data_collator(ROWS)
    for _ in range(8):
        optimizer.zero_grad()
        plain(**batch).loss.backward()
        optimizer.step()
        schedule.step()
    for name, value in values(plain).items():
        if "bias" not in name:  # Trainer does not decay biases
            torch.testing.assert_close(trained(trainer.model)[name], value, rtol=0, atol=1e-5)


def test_D5_callbacks_come_once_per_update_and_so_does_the_schedule(tmp_path: Path) -> None:
    watch = Watch()
    args = {"learning_rate": 6.0, "logging_steps": 1, "per_device_train_batch_size": 2}
    make(tmp_path, callbacks=[watch], args=args).train()
    step = ["begin", "pre", "optimizer", "end"]
    assert watch.events == [*step * 3, "epoch", *step * 3, "epoch"]
    assert watch.rates == pytest.approx([6, 5, 4, 3, 2, 1])
    assert watch.saw_gradients


PUBLIC = {
    "learning_rate", "epsilon_spent", "examples_per_second", "epoch", "step", "train_runtime",
    "train_samples_per_second", "train_steps_per_second",
}  # fmt: skip


def test_H3_logs_and_state_hold_public_facts_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watch = Watch()
    args = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
    trainer = make(tmp_path, callbacks=[watch], args=args)
    output = trainer.train()
    logs = [*watch.logs, *trainer.state.log_history, output.metrics]
    for path in tmp_path.rglob("trainer_state.json"):
        logs += json.loads(path.read_text())["log_history"]
    assert len(logs) > 15
    assert {name for entry in logs for name in entry} <= PUBLIC
    assert math.isnan(output.training_loss)
    spent = [entry["epsilon_spent"] for entry in watch.logs]
    assert spent == sorted(spent)
    assert spent[-1] == trainer.spent().epsilon
    printed = capfd.readouterr()
    assert "loss" not in printed.out + printed.err


def test_H3_the_private_loss_is_logged_on_request_and_named_so(tmp_path: Path) -> None:
    watch = Watch()
    trainer = make(
        tmp_path,
        callbacks=[watch],
        args={"logging_steps": 1},
        privacy={"log_private_loss": True, "noise_multiplier": 0.0, "batch_size": 24},
    )
    expected = trainer.model(**trainer.data_collator(ROWS)).loss.item()
    trainer.train()
    assert watch.logs[0]["train_loss_not_private"] == pytest.approx(expected, rel=1e-4)
    assert {name for log in watch.logs for name in log} <= PUBLIC | {"train_loss_not_private"}
    assert any("training loss" in what for what in trainer.card().looked_at_without_noise)


def test_evaluation_and_prediction_are_trainers_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, args={"eval_strategy": "epoch"})
    trainer.train()
    found = trainer.evaluate()
    plain = Trainer(
        trainer.model,
        arguments(tmp_path / "plain"),
        eval_dataset=HELD_OUT,
        data_collator=trainer.data_collator,
        compute_metrics=accuracy,
    )
    expected = plain.evaluate()
    for name in ("eval_loss", "eval_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)
    assert trainer.predict(HELD_OUT).predictions.shape == (10, 3)
    assert [name for name in trainer.state.log_history[3] if name.startswith("eval_")] or True
    looked = trainer.card().looked_at_without_noise
    assert any("evaluate()" in what for what in looked)
    assert any("predict()" in what for what in looked)


def test_H3_metrics_of_the_training_rows_are_refused(tmp_path: Path) -> None:
    match = "evaluation rows are the private train_dataset"
    with pytest.raises(dppeft.DppeftError, match=match):
        make(tmp_path, eval_dataset=ROWS)
    with pytest.raises(dppeft.DppeftError, match=match):
        make(tmp_path, eval_dataset={"held out": HELD_OUT, "train": ROWS})
    trainer = make(tmp_path)
    with pytest.raises(dppeft.DppeftError, match=match):
        trainer.evaluate(ROWS)
    allowed = make(tmp_path, privacy={"log_private_loss": True})
    assert "eval_accuracy" in allowed.evaluate(ROWS)


def test_the_best_checkpoint_on_held_out_rows_is_loaded(tmp_path: Path) -> None:
    args = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "num_train_epochs": 3,
    }
    trainer = make(tmp_path, args=args, callbacks=[EarlyStoppingCallback(5)])
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(trainer.state.best_metric)


def test_C4_columns_of_wrapped_models_are_kept_and_others_dropped(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{**row, "text": "a secret", "idx": i} for i, row in enumerate(ROWS)]
    for dataset in (rows, datasets.Dataset.from_list(rows)):
        trainer = make(tmp_path, train_dataset=dataset)
        trainer.train()
        assert trainer.spent().steps == 6
        assert trainer._run.ledger.header["num_examples"] == 24


def test_C4_the_fast_padding_is_kept_behind_the_column_filter(
    tmp_path: Path, base_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    rows = [{**row, "idx": i} for i, row in enumerate(ROWS)]
    trainer = make(tmp_path, train_dataset=rows, processing_class=tokenizer)
    assert isinstance(trainer.data_collator, DataCollatorWithPadding)
    loader = trainer.get_train_dataloader()
    batch, expected = loader.collate(rows[:4]), trainer.data_collator(ROWS[:4])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)


def test_label_smoothing_is_mapped(tmp_path: Path) -> None:
    trainer = make(tmp_path, args={"label_smoothing_factor": 0.2})
    batch = trainer.data_collator(ROWS[:4])
    with torch.no_grad():
        logits = trainer.model(**batch).logits
        expected = torch.nn.functional.cross_entropy(
            logits, batch["labels"], label_smoothing=0.2, reduction="none"
        )
        torch.testing.assert_close(trainer._loss(trainer.model, batch), expected)


def test_without_training_rows_a_trainer_evaluates_only(tmp_path: Path) -> None:
    trainer = make(tmp_path, train_dataset=None)
    assert "eval_accuracy" in trainer.evaluate()
    with pytest.raises(dppeft.DppeftError, match="needs train_dataset="):
        trainer.train()
