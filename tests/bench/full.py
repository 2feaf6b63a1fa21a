"""Full fine-tuning: a clipped sum against gradients without privacy and Opacus's ghost clipping.

All three do one physical batch of a logical one: their gradients are added to those of the batches
before. Noise and the optimizer's step, once for each logical batch, are left out.

python -m tests.bench.full private
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from tests.bench.measuring import (
    Work,
    compared,
    flops,
    in_a_new_process,
    interleaved,
    peak_mib,
    speed_ratio,
)

BATCH, LENGTHS, NORM = 16, (64, 128), 1.0
VOCABULARY = {"BERT": 30522, "GPT-2": 8192}
PLAIN, OURS, GHOST = "non-private step", "dppeft", "Opacus ghost clipping"
SPEED_OF_PLAIN, SPEED_OF_GHOST, FLOPS_OF_PLAIN, MEMORY_OF_PLAIN = 0.85, 1.8, 1.12, 1.35


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved steps, operations, and peaks of whole processes."""
    measured: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for kind in VOCABULARY:
        for length in LENGTHS:
            for total, part in zip(
                (measured, ratios), _compare(kind, length, repeats), strict=True
            ):
                total.update({f"{kind}, T={length}: {key}": value for key, value in part.items()})
    peaks = {which: in_a_new_process("tests.bench.full", which) for which in ("plain", "private")}
    for which, name in (("plain", PLAIN), ("private", OURS)):
        measured[f"BERT, T=128: peak of the process, {name}"] = peaks[which]
    ratios["BERT, T=128: dppeft / non-private, peak memory"] = compared(
        peaks["private"]["MiB"] / peaks["plain"]["MiB"], MEMORY_OF_PLAIN, at_most=True
    )
    return {
        "about": f"full fine-tuning, {BATCH} rows of T tokens, 4 layers of width 384",
        "threads": torch.get_num_threads(),
        "measured": measured,
        "ratios": ratios,
    }


def _compare(kind: str, length: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Milliseconds and GFLOP of a step of each contestant; the ratios."""
    batch = make_batch(kind, length)
    contestants: dict[str, Work] = {PLAIN: plain(kind, batch), OURS: _ours(kind, batch)}
    ghost, refused = GHOST, ""
    try:
        contestants[ghost] = ghost_clipping(kind, batch)
    except Exception as error:  # whatever stops Opacus is what we report
        refused = _reason(error)
        if kind == "GPT-2":
            ghost = f"{GHOST}, head not tied"
            contestants[ghost] = ghost_clipping(kind, batch, tied=False)
    times = interleaved(contestants, repeats)
    operations = {name: flops(work) for name, work in contestants.items()}
    measured = {
        name: {"ms": 1000 * statistics.median(times[name]), "GFLOP": operations[name] / 1e9}
        for name in contestants
    }
    ratios = {
        "dppeft / non-private, speed": compared(
            speed_ratio(times[OURS], times[PLAIN]), SPEED_OF_PLAIN
        ),
        "dppeft / non-private, operations": compared(
            operations[OURS] / operations[PLAIN], FLOPS_OF_PLAIN, at_most=True
        ),
    }
    if refused:
        ratios[f"dppeft / {GHOST}, speed"] = compared(refused, SPEED_OF_GHOST)
    if ghost in times:
        ratios[f"dppeft / {ghost}, speed"] = compared(
            speed_ratio(times[OURS], times[ghost]), SPEED_OF_GHOST
        )
    return measured, ratios


def make_model(kind: str, *, tied: bool = True, width: int = 384) -> nn.Module:
    """Small enough for a CPU; the same weights for all contestants."""
    torch.manual_seed(0)
    if kind == "BERT":
        config = BertConfig(
            vocab_size=VOCABULARY[kind],
            hidden_size=width,
            num_hidden_layers=4,
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
            num_labels=2,
        )
        return BertForSequenceClassification(config).train()
    config = GPT2Config(
        vocab_size=VOCABULARY[kind],
        n_embd=width,
        n_layer=4,
        n_head=width // 64,
        n_positions=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def make_batch(kind: str, length: int) -> dict[str, Tensor]:
    """Random ids, without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY[kind], (BATCH, length), generator=generator)
    labels = ids if kind == "GPT-2" else torch.randint(0, 2, (BATCH,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def plain(
    kind: str, batch: dict[str, Tensor], *, accumulated: bool = True, width: int = 384
) -> Work:
    """Gradients of the mean loss, as everybody makes them; added to ``.grad`` if wanted."""
    model = make_model(kind, width=width)

    def work() -> None:
        if not accumulated:
            model.zero_grad()
        model(**batch).loss.backward()

    return work


def _ours(kind: str, batch: dict[str, Tensor]) -> Work:
    """Clipped gradients, added to the sum of a logical batch."""
    model = make_model(kind)
    engine = make_engine(model, loss=default_loss(model))
    totals = engine.zero_sum(max_grad_norm=NORM).grads
    return lambda: engine.clipped_sum(batch, max_grad_norm=NORM, into=totals)


def ghost_clipping(
    kind: str, batch: dict[str, Tensor], *, tied: bool = True, width: int = 384
) -> Work:
    """Opacus's two backward passes, its own sum of batches; an error if it makes another sum."""
    model = make_model(kind, tied=tied, width=width)
    module = GradSampleModuleFastGradientClipping(
        model, loss_reduction="mean", max_grad_norm=NORM, strict=False
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1e-4),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=BATCH,
        loss_reduction="mean",
    )
    criterion = DPLossFastGradientClipping(
        module, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean"
    )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    # Its rule for embeddings takes the batch size from the ids: positions of one row would not do.
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).repeat(BATCH, 1)
    if kind == "BERT":
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    else:
        inputs["use_cache"] = False

    def work() -> None:
        optimizer.zero_grad()
        logits = module(**inputs).logits
        if kind == "BERT":
            criterion(logits, batch["labels"]).backward()
        else:
            logits, targets = logits[:, :-1], batch["labels"][:, 1:]
            shape = logits.shape
            criterion(logits.flatten(0, 1), targets.flatten(), shape=shape).backward()
        optimizer.signal_skip_step(do_skip=True)
        optimizer.step()  # adds up, and waits for the rest of the logical batch

    work()
    _check_sum(model, make_model(kind, tied=tied, width=width), batch)
    return work


def _check_sum(model: nn.Module, twin: nn.Module, batch: dict[str, Tensor]) -> None:
    """An error unless ``.grad`` holds the clipped sum: only equal results are compared."""
    engine = make_engine(twin, loss=default_loss(twin))
    ours = engine.clipped_sum(batch, max_grad_norm=NORM).grads
    theirs = {name: p.grad for name, p in model.named_parameters()}
    off = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours) ** 0.5
    size = sum(float(grad.square().sum()) for grad in ours.values()) ** 0.5
    if not off <= 1e-3 * size:
        raise ValueError(f"its clipped sum is off by {off / size:.0%} of its norm")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _peak(which: str) -> dict[str, float]:
    """Whole process and steps alone, of two steps on the BERT."""
    batch = make_batch("BERT", 128)
    without = which == "plain"
    work = plain("BERT", batch, accumulated=False) if without else _ours("BERT", batch)
    before = peak_mib()
    for _ in range(2):
        work()
    return {"MiB": peak_mib(), "MiB before the steps": before}


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1])))
