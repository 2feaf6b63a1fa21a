"""Which fields of TrainingArguments a private run honours, maps, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from dppeft.errors import ArgumentError

# Field -> (whether the value is fine, what to do instead). Fields not named here are honoured as
# they are: optimizer, schedule, logging, evaluation, saving, devices.
_Refusal = tuple[Callable[[Any], bool], str]

_REFUSED: dict[str, _Refusal] = {
    "gradient_accumulation_steps": (
        lambda value: value == 1,
        "the logical batch is Privacy.batch_size, whatever fits into memory at once; leave it at "
        "1 and raise Privacy.batch_size",
    ),
    "max_grad_norm": (
        lambda value: value in (None, 0, 0.0, 1.0),
        "each example is clipped to Privacy.max_grad_norm, and a second clipping of the released "
        "gradient would hide it; set Privacy.max_grad_norm and leave this one out",
    ),
    "fp16": (
        lambda value: not value,
        "its loss scaling skips updates after the rows were used; use bf16=True or "
        "Privacy.precision",
    ),
    "neftune_noise_alpha": (
        lambda value: not value,
        "its scale depends on the length of the other rows in the batch; leave it out",
    ),
    "torch_compile": (
        lambda value: not value,
        "per-example gradients are read at the layers, which compilation fuses; leave it out",
    ),
    "use_liger_kernel": (
        lambda value: not value,
        "its fused loss gives no value per example; leave it out",
    ),
    "auto_find_batch_size": (
        lambda value: not value,
        "it repeats a step whose rows were used; set Privacy.physical_tokens if memory runs out",
    ),
    "dataloader_drop_last": (
        lambda value: not value,
        "every row must keep its chance of being drawn; leave it out",
    ),
    "train_sampling_strategy": (
        lambda value: str(getattr(value, "value", value)) == "random",
        "rows are drawn by Poisson sampling, and each draw is sorted by length already; leave it "
        "out",
    ),
    "data_seed": (
        lambda value: value is None,
        "draws come from the operating system, or from Privacy.seed, which marks the run",
    ),
    "include_num_input_tokens_seen": (
        lambda value: str(getattr(value, "value", value)) in ("no", "False"),
        "the number of tokens drawn is private; leave it out",
    ),
    "debug": (
        lambda value: not value,
        "it prints activations of private rows; debug on public rows with transformers.Trainer",
    ),
    "deepspeed": (lambda value: not value, "sharded models are not supported; leave it out"),
    "fsdp": (lambda value: not value, "sharded models are not supported; leave it out"),
    "parallelism_config": (
        lambda value: value is None,
        "sharded models are not supported; leave it out",
    ),
    "optim": (
        lambda value: (
            not any(word in str(getattr(value, "value", value)) for word in ("lomo", "layerwise"))
        ),
        "it updates weights during the backward pass, before noise is added; use adamw_torch",
    ),
    "torch_empty_cache_steps": (
        lambda value: value is None,
        "physical batches are cut to fit the memory; set Privacy.physical_tokens",
    ),
    "push_to_hub": (
        lambda value: not value,
        "it uploads checkpoints with optimizer state; upload the directory of trainer.save_model()",
    ),
}


def check_arguments(args: TrainingArguments) -> None:
    """Raise an ArgumentError that names the first field which cannot be honoured."""
    for name, (fine, instead) in _REFUSED.items():
        value = getattr(args, name, None)
        if not fine(value):
            shown = getattr(value, "value", value)
            raise ArgumentError(
                f"TrainingArguments.{name}={shown!r} cannot be honoured: {instead}."
            )


def mapped_precision(args: TrainingArguments, precision: str) -> str:
    """``bf16=True`` asks for what ``precision="bf16"`` means; a contradiction is refused."""
    if not args.bf16:
        return precision
    if precision == "float32":
        raise ArgumentError(
            "TrainingArguments.bf16=True contradicts Privacy.precision='float32'. Leave out one."
        )
    return "bf16"


def mapped_physical_batch_size(args: TrainingArguments, asked: int | None) -> int | None:
    """``per_device_train_batch_size``, unless it has its default: most rows computed at once."""
    if asked is not None or args.per_device_train_batch_size == _DEFAULT_ROWS:
        return asked
    return args.per_device_train_batch_size


_DEFAULT_ROWS = TrainingArguments.__dataclass_fields__["per_device_train_batch_size"].default
