"""The model card ``README.md`` of a shared folder, in the form that model hubs read."""

from __future__ import annotations

from torch import nn

from dppeft._kind import kind_of
from dppeft.errors import ArgumentError
from dppeft.privacy.card import PrivacyCard
from dppeft.tuners import registry

_AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
}


def model_card(
    base: nn.Module,
    *,
    name: str | None,
    method: str,
    card: PrivacyCard,
    needs_dppeft: bool = False,
) -> str:
    """The text of README.md.

    Args:
        base: the base model, bare.
        name: its public name, or None.
        method: as ``wrap`` names it.
        card: what is claimed.
        needs_dppeft: PEFT knows this kind of adapter from dppeft alone.
    """
    whole = method == "full"
    header = ["library_name: transformers" if whole else "library_name: peft"]
    if name:
        header.append(f"base_model: {name}")
    header += ["tags:", "- differential-privacy", "- dppeft", f"- {method}"]
    try:
        described = registry.info(method)
        what = described.description + (f" Paper: {described.paper}" if described.paper else "")
    except ArgumentError:  # a PEFT tuner registered by somebody else
        what = "A tuner of PEFT."
    kind = "The whole model" if whole else "An adapter with its head"
    lines = [
        "---",
        *header,
        "---",
        "",
        f"# {kind}, trained with dppeft",
        "",
        f"- base model: {f'`{name}`' if name else f'a {type(base).__name__}'}",
        f"- method: `{method}`. {what}",
        "",
        card.markdown(),
        "## Use",
        "",
        "```python",
        *(["import dppeft  # PEFT learns this kind of adapter"] if needs_dppeft else []),
        *_usage(base, name=name, whole=whole),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _usage(base: nn.Module, *, name: str | None, whole: bool) -> list[str]:
    kind = kind_of(base)
    # A subclass of a transformers model has a forward of its own: no auto class makes it.
    known = type(base).__module__.startswith("transformers.")
    if whole and known and kind in _AUTO_CLASSES:
        return [
            f"from transformers import {_AUTO_CLASSES[kind]}",
            "",
            f'model = {_AUTO_CLASSES[kind]}.from_pretrained("path/to/this/folder")',
        ]
    if not known or kind not in _AUTO_CLASSES:
        return [
            "import dppeft",
            "",
            f"base = ...  # the {type(base).__name__} that was tuned",
            'model = dppeft.load(base, "path/to/this/folder")',
        ]
    labels = f", num_labels={base.config.num_labels}" if "classification" in kind else ""
    return [
        "from peft import PeftModel",
        f"from transformers import {_AUTO_CLASSES[kind]}",
        "",
        f'base = {_AUTO_CLASSES[kind]}.from_pretrained("{name or "the base model"}"{labels})',
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
        "# dppeft.load(base, folder) does the same and checks that it fits.",
    ]
