"""What is refused before any private row is used: data, optimizer, model, and the proof."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dppeft._kind import kind_of, modes_kept
from dppeft._types import Batch, KnowsNoise, PerExampleLoss
from dppeft.clipping.engine import Engine
from dppeft.clipping.preflight import PreflightReport, check, refuse_foreign_hooks
from dppeft.clipping.probing import refuse_mixing
from dppeft.errors import ArgumentError, ArgumentTypeError, DataError
from dppeft.training.distributed import refuse_wrapped
from dppeft.training.lifting import Lift
from dppeft.training.packing import Packer
from dppeft.training.precision import check_quantised, check_trained_dtypes

_ONE_DEVICE = "Load it on one device (device_map={'': 0})"
_FILTERED = "[p for p in model.parameters() if p.requires_grad]"


def check_dataset(dataset: Any) -> int:
    """The number of rows; an error unless rows can be fetched by index and counted."""
    if isinstance(dataset, DataLoader):
        raise ArgumentTypeError(
            "dataset is a DataLoader, whose shuffled batches are not the Poisson draws that the "
            "guarantee counts on. Pass the data set itself (loader.dataset) and collate_fn=; "
            "private.batches() draws."
        )
    name = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise ArgumentTypeError(
            f"dataset is a {name} of {', '.join(map(repr, list(dataset)[:4]))}; expected a data "
            "set of rows. Pick one split, or make rows with datasets.Dataset.from_dict(columns)."
        )
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise ArgumentTypeError(
            f"dataset is a {name}, which has no length or no access by index. Every row must have "
            "the same known chance of being drawn: load the rows into a list or a datasets.Dataset."
        )
    if len(dataset) == 0:
        raise DataError("dataset has no rows.")
    return len(dataset)


def check_rows_counted(num_rows: int, num_examples: int) -> None:
    """An error unless the plan was made for the data set that is trained on."""
    if num_rows != num_examples:
        raise ArgumentError(
            f"The data set has {num_rows:,} rows but the plan was made for num_examples="
            f"{num_examples:,}. Make the plan from the rows that are trained on, after filtering, "
            "packing and splitting: plan(num_examples=len(dataset), ...)."
        )


def check_first_row(row: Any) -> None:
    """An error that names the field when labels are class names. The value is not shown."""
    if isinstance(row, Mapping):
        for field in ("label", "labels", "label_ids"):
            if isinstance(row.get(field), str | bytes):
                raise DataError(
                    f"Field {field!r} of the rows is text; expected a number. Map class names to "
                    "0, 1, ... first and keep the names in config.id2label."
                )


def check_optimizer(model: nn.Module, optimizer: Any) -> Lift:
    """What the optimizer moves; an error unless that is all that trains.

    Frozen tensors of the model may be in it (``AdamW(model.parameters())``): they get no gradient.
    Tensors that are trained through others (RGP's matrices) count in the place of those;
    ``Lift.exchange`` puts them there.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer."
        )
    if "opacus" in type(optimizer).__module__:
        raise ArgumentError(
            "The optimizer is Opacus's and would clip and add noise a second time. Pass the plain "
            "torch optimizer."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "LBFGS evaluates the loss several times per update, each of which would have to be "
            "noised and counted. Use AdamW or SGD."
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ArgumentError(
            "No parameter of the model requires a gradient, so nothing would be trained while "
            "budget is spent. Use dppeft.wrap, or load the adapter with is_trainable=True."
        )
    lift = Lift(model, trained)
    if isinstance(optimizer, KnowsNoise) and lift.moved.keys() != trained.keys():
        raise ArgumentError(
            f"{type(optimizer).__name__} takes the noise in each coordinate to be independent and "
            "of one size, and what RGP's matrices move by is made of noised carriers. Use "
            "torch.optim.AdamW with rgp, or another method."
        )
    held = {id(p) for group in lift.groups(optimizer) for p in group}
    missing = [name for name, p in lift.moved.items() if id(p) not in held]
    if missing:
        raise ArgumentError(
            f"The optimizer lacks {len(missing)} of {len(lift.moved)} trained tensors, such as "
            f"{missing[0]!r}. Make it after dppeft.wrap from {_FILTERED}, or freeze what should "
            "not train (requires_grad_(False))."
        )
    foreign = len(held - {id(p) for p in model.parameters()})
    if foreign:
        raise ArgumentError(
            f"The optimizer holds {foreign} tensors that are not the model's. Make it after "
            f"dppeft.wrap from {_FILTERED}, and one optimizer for one model."
        )
    return lift


def check_model(model: Any) -> None:
    """An error for a model that is not a plain module, or that something else already hooks."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
    for module in model.modules():
        refuse_wrapped(module)
    _refuse_sharded(model)
    if "opacus" in type(model).__module__:
        raise ArgumentError(
            "The model is wrapped by Opacus (GradSampleModule). Pass the plain model "
            "(model._module): dppeft finds the per-example gradients itself."
        )
    refuse_foreign_hooks(model)
    refuse_mixing(model)
    _refuse_merged(model)
    _refuse_dispatched(model)
    _refuse_scattered(model)
    check_quantised(model)


def _refuse_merged(model: nn.Module) -> None:
    """An error where an adapter is folded into its layer, which then does not read it."""
    for path, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ArgumentError(
                f"{path}: its adapter is merged, so that no row could move it and it would get "
                "noise alone. Call model.unmerge_adapter() first."
            )


def _refuse_sharded(model: nn.Module) -> None:
    """An error for modules and tensors of which every process holds a part (FSDP2, ZeRO, TP)."""
    remedy = (
        "expected the whole model on every process. Leave it out of fully_shard, tp_plan and "
        "DeepSpeed's zero.Init: an adapter's gradients are small enough to be kept everywhere."
    )
    for path, module in model.named_modules():
        if "FSDPModule" in _names_of_classes(module):  # fully_shard makes a class FSDP<own name>
            name = path or type(module).__name__
            raise ArgumentError(f"{name} is sharded by fully_shard; {remedy}")
    for name, p in model.named_parameters():
        if "DTensor" in _names_of_classes(p) or hasattr(p, "ds_id"):
            raise ArgumentError(f"{name} is sharded over processes; {remedy}")


def _refuse_dispatched(model: nn.Module) -> None:
    """An error for models that accelerate spreads over devices or moves around each call."""
    for path, module in model.named_modules():
        places = vars(module).get("hf_device_map") or {}
        # Of one GPU, device_map writes the number or the name.
        devices = sorted({f"cuda:{d}" if isinstance(d, int) else str(d) for d in places.values()})
        if len(devices) > 1:
            raise ArgumentError(
                f"The model is spread over {', '.join(devices)} (hf_device_map), so no device sees "
                f"a whole gradient. {_ONE_DEVICE}; for data parallelism use `accelerate launch`."
            )
        hook = vars(module).get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False) or "CpuOffload" in type(one).__name__:
                raise ArgumentError(
                    f"{path or type(module).__name__}: accelerate's {type(one).__name__} offloads "
                    "this module between calls, so its weights are gone when gradients are taken. "
                    f"{_ONE_DEVICE}, in 4 bits if it is too large for that."
                )


def _refuse_scattered(model: nn.Module) -> None:
    """An error unless all parameters are on one device and have values there."""
    examples: dict[torch.device, str] = {}
    for name, p in model.named_parameters():
        examples.setdefault(p.device, name)
    if len(examples) > 1:
        where = ", ".join(f"{device} ({name})" for device, name in examples.items())
        raise ArgumentError(
            f"The model has parameters on more than one device: {where}. Move all of it, "
            "model.to(device), before the optimizer is made; after dppeft.wrap, for new layers."
        )
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ArgumentError(
            f"{empty[0]} is on the meta device, which holds no values ({len(empty)} tensors). Load "
            "the weights with from_pretrained(), or to_empty(device=...) and load_state_dict()."
        )


def _names_of_classes(thing: object) -> set[str]:
    return {kind.__name__ for kind in type(thing).__mro__}


def prove(model: nn.Module, packer: Packer, engine: Engine, *, engine_name: str) -> PreflightReport:
    """The preflight proof, on made-up rows where they can be made, and a warning on dead tensors.

    Models on tokens are proven on rows made from the vocabulary. For others, and where the loss
    does not take such rows, the first rows of the data set are used: what the proof says about them
    is only whether the run is refused, and no number of it is shown.
    """
    with in_training_mode(model, kept=kept_in_eval(model)):
        made_up = _made_up_rows(model, packer, engine.loss)
        batch = made_up or packer.batch(_first_rows(packer))
        report = check(model, batch, loss=engine.loss, engine=engine_name)
        if made_up is not None and report.without_signal:  # of private rows nothing is told
            _warn_of_dead_tensors(model, engine, batch)
        with torch.random.fork_rng():
            # The engine looks at the model's layers on its first batch; from here on a step calls
            # the loss once for each physical batch.
            engine.clipped_sum(batch, max_grad_norm=1.0)
    return replace(report, made_up=made_up is not None)


def _made_up_rows(model: nn.Module, packer: Packer, loss: PerExampleLoss) -> Batch | None:
    """Rows from the vocabulary that the loss can be computed on, or None.

    A loss that wants fields of its own may bring such rows: ``loss.made_up_rows(model)``.
    """
    if hasattr(loss, "made_up_rows"):
        return loss.made_up_rows(model)
    if kind_of(model) == "other":
        return None
    from dppeft.text import synthetic_rows

    try:
        rows = {name: rows.to(packer.device) for name, rows in synthetic_rows(model).items()}
        with torch.no_grad(), torch.random.fork_rng():
            loss(model, rows)
    except Exception:  # an image model, or a loss of the user's own that wants other fields
        return None
    return rows


def _first_rows(packer: Packer) -> list[int]:
    last = len(packer.source) - 1
    return [0, min(1, last), min(2, last)]


def _warn_of_dead_tensors(model: nn.Module, engine: Engine, batch: Batch) -> None:
    """Name trained tensors that no row can move, wherever the weights are.

    A gradient may be zero only because another tensor starts at zero, as half of every LoRA pair
    does; so the trained tensors are moved off their values and asked again. ``batch`` is made up,
    so the answer can be shown.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values = {name: p.detach().clone() for name, p in trained.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in trained.values():
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=0.02)
        with torch.random.fork_rng(devices=[]):
            grads = engine.per_example_grads(batch)
    finally:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(values[name])
    dead = [name for name, grad in grads.items() if not bool(grad.any())]
    if dead:
        warnings.warn(
            f"{len(dead)} trained tensors get no gradient from any row, such as {dead[0]!r}: they "
            "would receive noise only. Check that the forward pass uses them, or freeze them.",
            UserWarning,
            stacklevel=4,
        )


def kept_in_eval(model: nn.Module) -> frozenset[nn.Module]:
    """Modules that a user keeps in eval mode while the model trains (a frozen BatchNorm)."""
    if not model.training:
        return frozenset()
    return frozenset(module for module in model.modules() if not module.training)


def check_unchanged(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: dict[str, nn.Parameter],
    *,
    moved: dict[str, nn.Parameter] | None = None,
    device: torch.device | None = None,
) -> None:
    """An error unless what trains is what the run was made for. Before a draw is used.

    ``moved``: what the optimizer moves, where it is not what is trained. ``device``: where the
    run's batches go, if that is to be checked too.
    """
    moved = trained if moved is None else moved
    everything = dict(model.named_parameters())
    now = {name: p for name, p in everything.items() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    changed = sorted({
        *(n for n in now.keys() | trained.keys() if now.get(n) is not trained.get(n)),
        *(n for n, p in moved.items() if everything.get(n) is not p or id(p) not in held),
    })
    if changed:
        raise ArgumentError(
            f"{changed[0]} is no longer what the run was made to train ({len(changed)} tensors: "
            "frozen, unfrozen, merged, replaced, or taken out of the optimizer). Nothing was "
            "spent in this step. Make a new run with ledger= the path of this one's ledger."
        )
    _refuse_merged(model)
    check_trained_dtypes(trained | moved)  # .half() keeps the parameters and changes what they hold
    _refuse_scattered(model)
    now_on = next(iter(trained.values())).device
    if device is not None and now_on != device:
        raise ArgumentError(
            f"The model was moved to {now_on} after the run was made on {device}, where its "
            "batches go. Nothing was spent in this step. Move it back, or make a new optimizer and "
            "run with ledger= the path of this one's ledger."
        )


@contextmanager
def in_training_mode(
    model: nn.Module, *, kept: frozenset[nn.Module] = frozenset()
) -> Iterator[None]:
    """The model in training mode but for ``kept``; each module's own mode is put back on exit."""
    with modes_kept(model):
        model.train()
        for module in kept:
            module.training = False
        yield


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside ``accelerator.prepare(optimizer)``, else the thing itself.

    Accelerate's wrapper skips steps by a flag that its own data loaders set.
    """
    inner = getattr(optimizer, "optimizer", None)
    is_wrapper = type(optimizer).__name__ == "AcceleratedOptimizer"
    return inner if is_wrapper and isinstance(inner, torch.optim.Optimizer) else optimizer
