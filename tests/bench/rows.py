"""What every bench measures on: real rows, the 22M-parameter encoder, LoRA r=8 on query, value."""

from __future__ import annotations

import csv
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dppeft
from dppeft.text import TokenDataset, collator_for, tokenize_rows
from tasks import movie_reviews
from tasks.common import demo_encoder

MAX_LENGTH = 128
PHYSICAL_TOKENS = 1280  # per physical batch; what dppeft chooses for this encoder on a CPU
PHYSICAL_ROWS = 32  # per physical batch of the others


def load_rows(count: int) -> tuple[str, TokenDataset]:
    """SST-2 training rows from the folder DPPEFT_DATA; movie reviews where there is none."""
    folder = os.environ.get("DPPEFT_DATA")
    path = Path(folder) / "sst2_train.tsv" if folder else None
    if path is not None and path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        name, texts, labels = "SST-2", [row[0] for row in table], [int(row[1]) for row in table]
    else:
        rows = movie_reviews.load().train
        name, texts, labels = "movie reviews", list(rows.texts), list(rows.labels)
    chosen = random.Random(0).sample(range(len(texts)), min(count, len(texts)))
    encoded, _ = tokenize_rows(load_tokenizer(), [texts[i] for i in chosen], max_length=MAX_LENGTH)
    return name, TokenDataset(encoded, [labels[i] for i in chosen])


def load_tokenizer() -> Any:
    """The encoder's tokenizer."""
    return AutoTokenizer.from_pretrained(demo_encoder())


def load_encoder(attention: str = "sdpa") -> nn.Module:
    """The encoder with a head, dropout off."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        demo_encoder(),
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )


def load_model(attention: str = "sdpa") -> nn.Module:
    """The encoder with LoRA, in training mode."""
    base = load_encoder(attention)
    return dppeft.wrap(base, "lora", r=8, lora_alpha=16, target_modules=["query", "value"]).train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The tensors that train."""
    return [p for p in model.parameters() if p.requires_grad]


def sorted_batches(dataset: TokenDataset) -> list[dict[str, Tensor]]:
    """Physical batches as dppeft makes them: longest rows first, cut by a budget of tokens."""
    rows = sorted((dataset[i] for i in range(len(dataset))), key=lambda r: -len(r["input_ids"]))
    collate, batches, start = collator_for(load_tokenizer()), [], 0
    while start < len(rows):
        size = max(1, PHYSICAL_TOKENS // len(rows[start]["input_ids"]))
        batches.append(collate(rows[start : start + size]))
        start += size
    return batches
