"""Tiny random models and batches that every test can afford; nothing here comes from dppeft.

``build(name)`` makes a model with dropout 0 in training mode and the weights of a fixed seed;
``make_batch(name)`` makes a ragged, right-padded batch that fits it; ``row(batch, i)`` is one
example of it with the padding stripped. The names are the keys of ``MODELS``.

    model = build("bert", num_labels=3)
    batch = make_batch("bert", batch_size=4)
    wake(model)  # after wrap(): zero-initialised halves get values, so that no gradient is 0
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB, WIDTH, HEADS, LAYERS, INNER, POSITIONS = 64, 32, 2, 2, 64, 40
PAD = 1  # RoBERTa's own; the same everywhere, so that one batch fits every model
LENGTHS = (8, 3, 5, 2)  # ragged on purpose: padding faults only show when rows differ

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
}


def _bert(**labels: Any) -> BertConfig:
    return BertConfig(**{**_ENCODER, **labels})


def _roberta(**labels: Any) -> RobertaConfig:
    return RobertaConfig(**_ENCODER, **labels)


def _distilbert(**labels: Any) -> DistilBertConfig:
    return DistilBertConfig(
        vocab_size=VOCAB,
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=INNER,
        max_position_embeddings=POSITIONS,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        pad_token_id=PAD,
        **labels,
    )


def _electra(**labels: Any) -> ElectraConfig:
    return ElectraConfig(**_ENCODER, embedding_size=WIDTH, summary_last_dropout=0.0, **labels)


def _albert(**labels: Any) -> AlbertConfig:
    return AlbertConfig(**{**_ENCODER, **labels}, embedding_size=16, classifier_dropout_prob=0.0)


def _gpt2(**labels: Any) -> GPT2Config:
    return GPT2Config(**{
        "vocab_size": VOCAB,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": POSITIONS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": PAD,
        **labels,
    })


def _llama(**labels: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=PAD,
        **labels,
    )


def _t5(**labels: Any) -> T5Config:
    return T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        **labels,
    )


_Row = tuple[str, Callable[..., PretrainedConfig], Any]

# name -> (kind, config, class). The kind says what labels look like.
MODELS: dict[str, _Row] = {
    "bert": ("classes", _bert, BertForSequenceClassification),
    "roberta": ("classes", _roberta, RobertaForSequenceClassification),
    "distilbert": ("classes", _distilbert, DistilBertForSequenceClassification),
    "electra": ("classes", _electra, ElectraForSequenceClassification),
    "albert": ("classes", _albert, AlbertForSequenceClassification),
    "gpt2-classify": ("classes", _gpt2, GPT2ForSequenceClassification),
    "llama-classify": ("classes", _llama, LlamaForSequenceClassification),
    "gpt2": ("causal", _gpt2, GPT2LMHeadModel),
    "llama": ("causal", _llama, LlamaForCausalLM),
    "t5": ("seq2seq", _t5, T5ForConditionalGeneration),
    "bert-mlm": ("masked", _bert, BertForMaskedLM),
    "roberta-mlm": ("masked", _roberta, RobertaForMaskedLM),
    "distilbert-mlm": ("masked", _distilbert, DistilBertForMaskedLM),
    "bert-tokens": ("tokens", _bert, BertForTokenClassification),
}


def build(
    name: str, *, num_labels: int = 3, seed: int = 0, double: bool = False, **config: Any
) -> nn.Module:
    """A model of ``MODELS`` with fixed random weights, dropout 0, in training mode.

    Args:
        name: a key of ``MODELS``.
        num_labels: classes of the head; ignored by language models.
        seed: of the weights. The global generator is left as it was.
        double: float64 instead of float32.
        config: further fields of the model's config, e.g. ``problem_type="regression"``.
    """
    kind, make_config, model_class = MODELS[name]
    labels = {"num_labels": num_labels} if kind in ("classes", "tokens") else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(make_config(**labels, **config))
        for parameter in model.parameters():
            # The default 0.02 makes attention all but uniform and hides faults in its gradients.
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.train()
    return model.double() if double else model


def make_batch(
    name: str,
    *,
    batch_size: int = 4,
    lengths: Iterable[int] | None = None,
    num_labels: int = 3,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A ragged, right-padded batch with labels for ``build(name)``.

    Returns:
        ``input_ids`` and ``attention_mask`` of shape (B, T), and ``labels``: (B,) for classes,
        (B, T) with -100 on the padding for causal, masked and token models, (B, T') for seq2seq.
    """
    kind = MODELS[name][0]
    generator = torch.Generator().manual_seed(seed)
    all_lengths = (LENGTHS * batch_size)[:batch_size] if lengths is None else tuple(lengths)
    width = max(all_lengths)
    mask = (torch.arange(width) < torch.tensor(all_lengths)[:, None]).long()
    # From 2 up: 0 is the end token and 1 the padding.
    ids = torch.randint(2, VOCAB, mask.shape, generator=generator)
    batch = {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}
    if kind == "classes":
        labels = torch.randint(num_labels, (len(all_lengths),), generator=generator)
    elif kind == "causal":
        labels = ids.masked_fill(mask == 0, -100)
    elif kind == "tokens":
        labels = torch.randint(num_labels, mask.shape, generator=generator)
        labels = labels.masked_fill(mask == 0, -100)
    elif kind == "masked":
        chosen = torch.rand(mask.shape, generator=generator) < 0.4
        chosen[:, 0] = True  # every row keeps a target
        labels = ids.masked_fill((mask == 0) | ~chosen, -100)
    else:  # seq2seq: targets are ragged too, in another order than the sources
        target = torch.arange(width) < torch.tensor(all_lengths[::-1])[:, None]
        labels = torch.randint(2, VOCAB, target.shape, generator=generator)
        labels = labels.masked_fill(~target, -100)
    return {**batch, "labels": labels}


def row(batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One example of a batch of ``make_batch``, shape (1, ...), its padding stripped."""
    length = int(batch["attention_mask"][index].sum())
    source_width = batch["input_ids"].shape[1]
    one = {}
    for key, value in batch.items():
        single = value[index : index + 1]
        if key == "labels" and single.dim() == 2:
            used = (single[0] != -100).nonzero()
            last = int(used[-1]) + 1 if len(used) else 1
            # Labels beside the tokens keep their length; a seq2seq target has its own.
            single = single[:, : max(length, last) if _aligned(batch) else last]
        elif single.dim() == 2 and single.shape[1] == source_width:
            single = single[:, :length]
        one[key] = single
    return one


def _aligned(batch: dict[str, Tensor]) -> bool:
    """Whether labels sit beside the input tokens: never a label on padding."""
    labels, mask = batch["labels"], batch["attention_mask"]
    return labels.shape == mask.shape and not bool(((labels != -100) & (mask == 0)).any())


def wake(model: nn.Module, *, std: float = 0.2, seed: int = 1) -> nn.Module:
    """Move every trainable tensor off its start value.

    Zero-initialised halves of an adapter make half of the true gradients exactly 0, and a check on
    them vacuous.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=std)
    return model


# What save_folder()'s tokenizer knows: three words of praise, three of blame, filler.
WORDS = ("good", "fine", "great", "bad", "poor", "awful", "film", "plot", "a", "the", "very", "not")


def save_folder(directory: Path, *, pad_token: bool = True) -> Path:
    """A base model's folder as users have it: a tiny random BERT and a tokenizer of ``WORDS``."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = Lowercase()
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        pad_token="[PAD]" if pad_token else None,
        model_max_length=POSITIONS,
    )
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(**{**_ENCODER, "pad_token_id": 0 if pad_token else None})
        model = BertModel(config)
        for parameter in model.parameters():  # words must differ, so that a head can learn
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(directory)
    return directory


# What save_decoder()'s tokenizer knows: properties, values and the words of sentences about them.
PLACES, FOODS = ("alimentum", "zizzi", "strada", "giraffe"), ("french", "indian", "italian")
SENTENCE = (
    "name",
    "food",
    ":",
    "|",
    ".",
    "is",
    "a",
    "an",
    "place",
    "which",
    "serves",
    "with",
    "the",
)


def save_decoder(directory: Path) -> Path:
    """A tiny random GPT-2 and a tokenizer of words, without a padding token, as GPT-2 has it."""
    vocabulary = {"<|endoftext|>": 0, "<unk>": 1}
    for word in (*SENTENCE, *PLACES, *FOODS):
        vocabulary[word] = len(vocabulary)
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = Lowercase()
    core.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    ).save_pretrained(directory)
    build("gpt2", vocab_size=len(vocabulary), pad_token_id=None).save_pretrained(directory)
    return directory


def descriptions(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Sources and sentences about them; a source comes with more than one sentence."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        place, food = generator.choice(PLACES), generator.choice(FOODS)
        sentence = generator.choice(("is a place which serves {}", "serves the {} food"))
        pairs.append((f"name : {place} | food : {food}", f"{place} {sentence.format(food)} ."))
    return pairs


def opinions(count: int, *, seed: int = 0) -> tuple[list[str], list[int]]:
    """Texts of ``WORDS`` and whether they praise: learnable from one word each."""
    generator = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        label = generator.randrange(2)
        word = generator.choice(WORDS[0:3] if label else WORDS[3:6])
        filler = generator.choices(WORDS[6:11], k=generator.randrange(1, 6))
        filler.insert(generator.randrange(len(filler) + 1), word)
        texts.append(" ".join(filler))
        labels.append(label)
    return texts, labels
