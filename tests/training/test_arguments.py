"""What PrivateTrainer cannot honour is refused by name, before any row is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import dppeft
from dppeft.training.arguments import (
    check_arguments,
    mapped_physical_batch_size,
    mapped_precision,
)
from tests.training.runs import adapted_bert, token_rows

REFUSED: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (4, "raise Privacy.batch_size"),
    "max_grad_norm": (0.1, "set Privacy.max_grad_norm"),
    "neftune_noise_alpha": (5.0, "length of the other rows"),
    "use_liger_kernel": (True, "no value per example"),
    "auto_find_batch_size": (True, "Privacy.physical_tokens"),
    "dataloader_drop_last": (True, "keep its chance of being drawn"),
    "train_sampling_strategy": ("group_by_length", "sorted by length already"),
    "data_seed": (3, "Privacy.seed"),
    "include_num_input_tokens_seen": (True, "number of tokens drawn is private"),
    "debug": ("underflow_overflow", "prints activations of private rows"),
    "torch_empty_cache_steps": (3, "Privacy.physical_tokens"),
    "optim": ("lomo", "before noise is added"),
    "push_to_hub": (True, "trainer.save_model"),
}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **changes)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_honoured_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    value, remedy = REFUSED[name]
    args = arguments(tmp_path, **{name: value})
    with pytest.raises(dppeft.DppeftError, match=rf"TrainingArguments\.{name}=.*{remedy}") as error:
        make(args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fp16", "torch_compile", "fsdp", "deepspeed"])
def test_fields_that_need_hardware_to_be_set(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(dppeft.DppeftError, match=rf"TrainingArguments\.{name}=True cannot be"):
        check_arguments(args)


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    check_arguments(arguments(tmp_path))
    check_arguments(arguments(tmp_path, max_grad_norm=0.0))


def test_bf16_and_the_physical_batch_are_mapped(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert mapped_precision(args, "auto") == "auto"
    assert mapped_physical_batch_size(args, None) is None
    assert mapped_physical_batch_size(args, 5) == 5
    args.bf16, args.per_device_train_batch_size = True, 32
    assert mapped_precision(args, "auto") == mapped_precision(args, "bf16") == "bf16"
    assert mapped_physical_batch_size(args, None) == 32
    with pytest.raises(dppeft.DppeftError, match="bf16=True contradicts Privacy.precision"):
        mapped_precision(args, "float32")


def make(args: TrainingArguments, **changes: Any) -> Any:
    privacy = dppeft.Privacy(epsilon=8, delta=1e-3, batch_size=4)
    given = {"train_dataset": token_rows(8), "privacy": privacy, **changes}
    model = given.pop("model", None) or adapted_bert()
    return dppeft.PrivateTrainer(model, args, **given)


GIVEN = {
    "privacy": (None, "privacy is a NoneType; expected dppeft.Privacy"),
    "compute_loss_func": (len, r"compute_loss_func= .*Pass Privacy\(loss=\)"),
    "model_init": (adapted_bert, "model_init= would train anew, and spend anew"),
    "train_dataset": (iter([]), "no length or no access by index"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_of_trainer_that_cannot_be_taken(tmp_path: Path, name: str) -> None:
    value, match = GIVEN[name]
    with pytest.raises(dppeft.DppeftError, match=match):
        make(arguments(tmp_path), **{name: value})


def test_misspelt_arguments_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="train_datset"):
        make(arguments(tmp_path), train_datset=[])
    with pytest.raises(TypeError, match="eps"):
        dppeft.Privacy(eps=8, delta=1e-5, batch_size=4)


def test_A19_a_search_over_trials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dppeft.DppeftError, match="once per trial and report the epsilon of one"):
        make(arguments(tmp_path)).hyperparameter_search()


def test_smoothing_and_a_loss_of_ones_own_do_not_mix(tmp_path: Path) -> None:
    privacy = dppeft.Privacy(
        epsilon=8, delta=1e-3, batch_size=4, loss=lambda model, batch: model(**batch).logits[:, 0]
    )
    with pytest.raises(dppeft.DppeftError, match="label_smoothing_factor=0.1 cannot be put into"):
        make(arguments(tmp_path, label_smoothing_factor=0.1), privacy=privacy)
