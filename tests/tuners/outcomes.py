"""What becomes of a tuner on a model: exact, refused, or not built by PEFT. Anything else is wrong.

    python -m tests.tuners.outcomes     # writes the README's table

The tuners are PEFT's own list, so that one added by a later PEFT is looked at without a line here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

import dppeft
from dppeft.loss import default_loss
from tests import oracle, tiny

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- tuners: made by python -m tests.tuners.outcomes -->", "<!-- end of tuners -->"
MODELS = {"roberta": "RoBERTa", "gpt2": "GPT-2", "llama": "Llama", "t5": "T5"}
TUNERS = sorted(kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
EXACT, REFUSED, NOT_BUILT, WRONG = "exact", "refused", "–", "WRONG"

# What a tuner needs to be told on models this small, or cannot do without.
OPTIONS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 10},
    "adaption_prompt": {"adapter_len": 4, "adapter_layers": 2},
    "boft": {"boft_block_size": 8},
    "c3a": {"block_size": 8},
    "cartridge": {"num_virtual_tokens": 5},
    "fourierft": {"n_frequency": 20},
    "miss": {"r": 8},
    "oft": {"oft_block_size": 8},
    "p_tuning": {"num_virtual_tokens": 5, "encoder_hidden_size": 32},
    "poly": {"n_tasks": 2},
    "prefix_tuning": {"num_virtual_tokens": 5},
    "prompt_tuning": {"num_virtual_tokens": 5},
    "multitask_prompt_tuning": {"num_virtual_tokens": 5, "num_tasks": 2},
    "cpt": {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "psoft": {"r": 8},
    "road": {"group_size": 8},
    "shira": {"r": 4},
    "trainable_tokens": {"token_indices": list(range(2, 40))},
    "vblora": {"vector_length": 16, "num_vectors": 32, "topk": 2},
    "waveft": {"n_frequency": 20},
}
# Tuners whose forward asks for more than a batch usually holds.
EXTRA = {"multitask_prompt_tuning": ("task_ids",), "poly": ("task_ids",)}
DRAWS = ("poly",)  # tuners that draw for a whole batch at once: no row has a gradient by itself
# Refusals of ours that only say what PEFT's tuner does not do.
_PEFTS_LIMITS = (
    "PEFT cannot build",
    "PEFT refuses",
    "cannot train the head",
    "leaves nothing to train",
    "needs a model that takes past_key_values",
    "own forward fails",
)


def outcome(tuner: str, model_name: str) -> tuple[str, str]:
    """(one of the four words, why)."""
    torch.manual_seed(0)
    try:
        model = dppeft.wrap(tiny.build(model_name), tuner, **OPTIONS.get(tuner, {}))
    except dppeft.DppeftError as error:
        return _refusal(error)
    # Little: many tuners are unstable far from their start, and no test of gradients.
    tiny.wake(model, std=0.02).train()
    batch = tiny.make_batch(model_name)
    size = len(batch["labels"])
    batch |= {key: torch.arange(size) % 2 for key in EXTRA.get(tuner, ())}
    rows = [tiny.row(batch, i) for i in range(size)]
    try:
        truth = _of_one_draw(model, batch) if tuner in DRAWS else oracle.per_example(model, rows)
    except Exception:  # PEFT's own forward fails; then so must ours
        truth = {}
    try:
        torch.manual_seed(0)
        found = dppeft.per_example_grads(model, batch)
    except dppeft.DppeftError as error:
        return _refusal(error)
    if not any(bool(grad.any()) for grad in truth.values()):
        return WRONG, "no gradient at all: nothing was compared"
    error = oracle.worst_error(found, truth)
    return (EXACT if error < 2e-3 else WRONG), f"{error:.1e} from the definition"


def _of_one_draw(model: nn.Module, batch: dict[str, torch.Tensor]) -> oracle.Grads:
    """Each row's gradient within the whole batch, for one draw of the model's random numbers."""
    torch.manual_seed(0)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses = default_loss(model)(model, batch)
    rows = [
        torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True)
        for loss in losses
    ]
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(params.items())
    }


def _refusal(error: Exception) -> tuple[str, str]:
    limit = any(words in str(error) for words in _PEFTS_LIMITS)
    return (NOT_BUILT if limit else REFUSED), str(error)


def table() -> str:
    """Markdown, one row per tuner; reasons below."""
    found = {(t, m): _seen(t, m) for t in TUNERS for m in MODELS}
    lines = [
        f"| tuner | {' | '.join(MODELS.values())} |",
        f"|---|{'---|' * len(MODELS)}",
        *(f"| `{t}` | {' | '.join(found[t, m][0] for m in MODELS)} |" for t in TUNERS),
    ]
    count = {word: sum(v[0] == word for v in found.values()) for word in (EXACT, REFUSED, WRONG)}
    lines += ["", ", ".join(f"{number} {word.lower()}" for word, number in count.items()) + "."]
    return "\n".join(lines)


def cell(text: str, tuner: str, model_name: str) -> str | None:
    """What a README says about a tuner on a model."""
    part = text.partition(START)[2].partition(END)[0]
    for line in part.splitlines():
        name, *cells = [word.strip() for word in line.strip("|").split("|")]
        if name == f"`{tuner}`":
            return cells[list(MODELS).index(model_name)]
    return None


def _seen(tuner: str, model_name: str) -> tuple[str, str]:
    word, why = outcome(tuner, model_name)
    if word != EXACT:
        print(f"{tuner:24} {model_name:8} {word:8} {why[:200]}", file=sys.stderr)
    return word, why


if __name__ == "__main__":
    text = README.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")
