"""Where a method acts in a model: its default targets, and the head that always trains."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn

from dppeft._kind import ModelKind, unwrap

Layers = list[int] | int | None
Words = list[str] | str | None

# What implementations call the projections to queries and values, one line per convention; a
# convention counts when all of its names are there. Fused projections hold the keys as well.
_QUERY_VALUE = (
    ("query", "value"),  # BERT, RoBERTa, ALBERT, ELECTRA, ViT
    ("q_proj", "v_proj"),  # Llama, BART, OPT, CLIP
    ("query_proj", "value_proj"),  # DeBERTa-v2
    ("q_lin", "v_lin"),  # DistilBERT, XLM
    ("q", "v"),  # T5, MPNet
    ("q_linear", "v_linear"),
    ("linear_q", "linear_v"),  # Conformers
    ("to_q", "to_v"),
    ("wq", "wv"),
    ("Wq", "Wv"),  # CTRL
    ("project_q", "project_v"),
    ("q_head", "v_head"),  # Funnel
    ("q_b_proj", "kv_b_proj"),  # DeepSeek: the projections out of the latent space
    ("query_key_value",),  # GPT-NeoX, BLOOM, Falcon
    ("Wqkv",),  # ModernBERT, MPT
    ("qkv_proj",),  # Phi-3
    ("qkv",),
    ("c_attn",),  # GPT-2
    ("in_proj",),  # DeBERTa
)
# Output projections of (attention, feed-forward part) of a block, as regular expressions for the
# last words of a name. One line per convention; a convention counts when both are there.
_BLOCK_OUTPUTS = (
    (r"\w*attention\.output\.dense", r"(?<!attention\.)output\.dense"),  # BERT, RoBERTa, DeBERTa
    (r"attention\.out_lin", r"ffn\.lin2"),  # DistilBERT
    (r"attention\.dense", r"ffn_output"),  # ALBERT
    (r"attention\.attn\.o", r"(?<!attention\.)output\.dense"),  # MPNet
    (r"\w*attn\.(?:o_proj|out_proj)", r"(?:mlp\.down_proj|fc2)"),  # Llama, Qwen, BART, OPT
    (r"attention\.o_proj", r"mlp\.fc2"),  # ViT
    (r"(?:attn|crossattention)\.c_proj", r"mlp\.c_proj"),  # GPT-2
    (r"\w*Attention\.o", r"DenseReluDense\.wo"),  # T5
    (r"\w*attention\.dense", r"mlp\.dense_4h_to_h"),  # GPT-NeoX, BLOOM, Falcon
    (r"attn\.Wo", r"mlp\.Wo"),  # ModernBERT
    (r"attn\.out_proj", r"mlp\.fc_out"),  # GPT-J
    (r"attention\.out_proj", r"mlp\.c_proj"),  # GPT-Neo
)
# What a classification head is called where nothing but its name tells: plain nn.Modules.
_HEAD_NAMES = ("classifier", "score", "classification_head", "head", "fc", "qa_outputs")


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that a low-rank adapter can stand beside.

    Linear layers inside ``nn.MultiheadAttention`` are left out: it reads their weights without
    calling them, so that an adapter there would have no effect.
    """
    from transformers.pytorch_utils import Conv1D

    blind = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    )
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not name.startswith(blind)
    ]


def describe_linear_layers(model: nn.Module) -> str:
    """One line for error messages: ``query (2), value (2), classifier (1)``."""
    counts = Counter(_last_word(name) for name in linear_layers(model))
    return ", ".join(f"{word} ({count})" for word, count in counts.items()) or "none"


def default_targets(
    model: nn.Module, table: dict[str, list[str] | str], *, norms: bool = False
) -> list[str] | str | None:
    """The modules that a tuner targets when the user names none.

    Args:
        model: bare.
        table: model type -> targets: the tuner's own table in PEFT. It comes first.
        norms: whether the tuner acts on normalisation layers instead of linear ones.

    Returns:
        Targets as PEFT takes them; None where neither the table nor the usual names fit.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    listed = table.get(model_type) if model_type else None
    names = [name for name, _ in model.named_modules()]
    if listed and any(_hits(listed, name) for name in names):
        return listed
    if norms:
        layers = [
            name
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower()
        ]
        return sorted({_last_word(name) for name in layers}) or None
    words = {_last_word(name) for name in linear_layers(model)}
    for convention in _QUERY_VALUE:
        if words.issuperset(convention):
            return list(convention)
    return None


def all_linear(model: nn.Module, trained_whole: list[str]) -> set[str] | str:
    """Every linear layer but the output layer and what trains whole, as PEFT takes targets."""
    chosen = _beside(model, linear_layers(model), trained_whole)
    return _exactly(chosen, dict(model.named_modules()))


def _beside(model: nn.Module, names: Iterable[str], trained_whole: list[str]) -> set[str]:
    """Those that are neither the output layer nor inside what trains whole."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    whole = tuple(f"{name}." for name in trained_whole)
    return {
        name
        for name in names
        if model.get_submodule(name) is not output and not f"{name}.".startswith(whole)
    }


def _exactly(chosen: set[str], names: Iterable[str]) -> set[str] | str:
    """These modules and no others: PEFT takes the last words of a name, or a regular expression."""
    also = {name for name in names if name not in chosen and _hits(list(chosen), name)}
    return "|".join(re.escape(name) for name in sorted(chosen)) if also else chosen


def block_outputs(
    model: nn.Module, *, attention: bool, layers: Layers = None, pattern: Words = None
) -> set[str] | str | None:
    """The layers whose output a bottleneck follows: of each block's feed-forward part.

    Args:
        model: bare.
        attention: those of the attention parts, too.
        layers: numbers of the blocks; None: all.
        pattern: what the lists of blocks are called that the numbers mean; None: any.

    Returns:
        Targets as PEFT takes them; None where the names fit no convention.
    """
    names = linear_layers(model)
    for patterns in _BLOCK_OUTPUTS:
        of_attention, of_feed_forward = (
            {name for name in names if re.fullmatch(rf"(?:.*\.)?{pattern}", name)}
            for pattern in patterns
        )
        if of_attention and of_feed_forward:
            chosen = of_feed_forward | (of_attention if attention else set())
            chosen = _in_layers(chosen, layers, pattern)
            return _exactly(chosen, [name for name, _ in model.named_modules()])
    return None


def block_matrices(
    model: nn.Module, trained_whole: list[str], *, layers: Layers = None, pattern: Words = None
) -> set[str] | str | None:
    """Every linear and 2-d convolution layer of the blocks, as PEFT takes targets.

    Blocks are what has a number in its name. A model without linear layers there (a convolutional
    network) is taken whole, but for its output layer and what trains whole.
    """
    modules = dict(model.named_modules())
    convolutions = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
    chosen = _beside(model, [*linear_layers(model), *convolutions], trained_whole)
    inside = {name for name in chosen if re.search(r"\.\d+\.", name)}
    if all(isinstance(modules[name], nn.Conv2d) for name in inside):
        inside = chosen
    return _exactly(_in_layers(inside, layers, pattern), modules) or None


def _in_layers(names: set[str], layers: Layers, pattern: Words) -> set[str]:
    """Those in blocks of these numbers: PEFT itself picks no layers among modules named in full."""
    if layers is None:
        return names
    wanted = {layers} if isinstance(layers, int) else set(layers)
    words = [pattern] if isinstance(pattern, str) else list(pattern or [r"\w+"])
    numbered = re.compile(rf"(?:^|\.)(?:{'|'.join(words)})\.(\d+)\.")
    numbers = {name: numbered.search(name) for name in names}
    return {name for name, found in numbers.items() if found and int(found[1]) in wanted}


def missing_targets(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Those of the targets that match no module. PEFT itself passes over them in silence."""
    names = [name for name, _ in model.named_modules()]
    return [target for target in targets if not any(_hits([target], name) for name in names)]


def find_head(model: nn.Module, kind: ModelKind) -> list[str]:
    """The modules that make the prediction and are new for the task, so that they must train.

    In a ``transformers`` classifier: whatever holds parameters beside the pretrained backbone
    (``base_model_prefix``): ``classifier``, ``score``, DistilBERT's ``pre_classifier`` and
    ``classifier``, DeBERTa's ``pooler`` and ``classifier``, ``qa_outputs``. A pooler inside the
    backbone (BERT) counts as pretrained. A language model has no head of its own: its output layer
    is pretrained and often tied to the embedding. In a plain ``nn.Module``: the children with the
    usual names of a head, else its last linear layer.
    """
    model = unwrap(model)
    if kind in ("causal_lm", "seq2seq_lm", "masked_lm"):
        return []
    prefix = getattr(model, "base_model_prefix", "")
    if prefix:
        if kind == "other" and model.get_output_embeddings() is not None:
            return []
        if not hasattr(model, prefix):  # the backbone itself
            return [] if kind == "other" else _named_head(model)
        beside = [
            name
            for name, child in model.named_children()
            if name != prefix and next(child.parameters(), None) is not None
        ]
        if beside or kind == "other":
            return beside
    return _named_head(model) or linear_layers(model)[-1:]


def _named_head(model: nn.Module) -> list[str]:
    return [
        name
        for name, child in model.named_children()
        if name in _HEAD_NAMES and next(child.parameters(), None) is not None
    ]


def _hits(targets: list[str] | str, name: str) -> bool:
    """PEFT's own rule: a regular expression for the whole name, or the last words of it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _last_word(name: str) -> str:
    return name.rsplit(".", 1)[-1]
