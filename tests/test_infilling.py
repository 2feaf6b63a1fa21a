"""Infilling: the word at the mask is the model's own, and each row's gradient is its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, TrainingArguments

import dppeft
from dppeft.errors import ArgumentError, DataError, UnsupportedModelError
from dppeft.infilling import Infilling
from dppeft.text import Template, TokenDataset, collator_for
from tests import oracle, tiny

CUT = "{text} very {mask}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.save_folder(tmp_path_factory.mktemp("base")))


@pytest.fixture
def infilling(tokenizer: Any) -> Infilling:
    return Infilling(tokenizer, CUT, ["bad", "good", "not"])


MODELS = ("bert-mlm", "roberta-mlm", "distilbert-mlm")


def batch_of(infilling: Infilling, tokenizer: Any) -> dict[str, Tensor]:
    texts = ["a great film", "the awful plot the very awful plot", "film", "a very poor plot"]
    dataset = TokenDataset(infilling.encode(texts, max_length=30).rows, [1, 0, 2, 0])
    return collator_for(tokenizer)([dataset[i] for i in range(4)])


def definition(infilling: Infilling, smoothing: float = 0.0) -> Any:
    """The loss of one row from the whole model's logits, written out."""

    def loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}
        logits = model(**inputs).logits[0, int(row["mask_position"]), infilling.word_ids]
        log_probs = logits - logits.exp().sum().log()
        chosen = log_probs[int(row["labels"])]
        return -(1 - smoothing) * chosen - smoothing * log_probs.sum() / len(log_probs)

    return loss


def rows_alone(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [tiny.row(batch, i) for i in range(len(batch["labels"]))]


METHODS = ("lora", "adapter", "compacter", "rgp", "bitfit", "full")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_models_own_logits(
    name: str, smoothing: float, infilling: Infilling, tokenizer: Any
) -> None:
    model, batch = tiny.build(name).double(), batch_of(infilling, tokenizer)
    truth = [definition(infilling, smoothing)(model, row) for row in rows_alone(batch)]
    found = infilling.loss(label_smoothing=smoothing)(model, batch)
    torch.testing.assert_close(found, torch.stack(truth), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_each_rows_gradient_is_that_of_the_row_alone(
    name: str, method: str, infilling: Infilling, tokenizer: Any
) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build(name), method))
    batch = batch_of(infilling, tokenizer)
    found = dppeft.per_example_grads(model, batch, loss=infilling.loss())
    truth = oracle.per_example(model, rows_alone(batch), definition(infilling))
    assert oracle.worst_error(found, truth) < 1e-4
    assert all(float(grad.norm()) > 0 for grad in truth.values() if method == "lora")


def test_full_with_the_words_bias_frozen_reads_the_label_words_alone(
    infilling: Infilling, tokenizer: Any
) -> None:
    """The quick way, by the rows of the tied table; the whole projection is never called."""
    model, batch = dppeft.wrap(tiny.build("bert-mlm"), "full"), batch_of(infilling, tokenizer)
    infilling.freeze_bias(model)
    truth = oracle.per_example(model, rows_alone(batch), definition(infilling))
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    found = dppeft.per_example_grads(model, batch, loss=infilling.loss())
    assert oracle.worst_error(found, truth) < 1e-4
    assert not calls
    table = found["bert.embeddings.word_embeddings.weight"]
    assert all(float(table[:, i].norm()) > 0 for i in infilling.word_ids)  # as output words, too


@pytest.mark.parametrize("tie", [True, False])
def test_an_untied_projection_is_called(tie: bool, infilling: Infilling, tokenizer: Any) -> None:
    model, batch = tiny.build("bert-mlm", tie_word_embeddings=tie), batch_of(infilling, tokenizer)
    decoder = model.get_output_embeddings()
    if not tie:
        decoder.weight = nn.Parameter(torch.randn_like(decoder.weight))
    infilling.check(model)
    found = infilling.logits(model, batch)
    truth = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    at_mask = truth[torch.arange(4), batch["mask_position"]][:, infilling.word_ids]
    torch.testing.assert_close(found, at_mask, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(infilling: Infilling, tokenizer: Any) -> None:
    model, batch = tiny.build("roberta-mlm").double(), batch_of(infilling, tokenizer)
    wider = dict(batch)
    for field, fill in (("input_ids", 0), ("attention_mask", 0)):
        wider[field] = torch.nn.functional.pad(batch[field], (0, 5), value=fill)
    loss = infilling.loss()
    torch.testing.assert_close(loss(model, wider), loss(model, batch), rtol=1e-9, atol=1e-9)


def test_a_private_run_is_proven_on_rows_that_are_nobodys(
    infilling: Infilling, tokenizer: Any, tmp_path: Path
) -> None:
    model = dppeft.wrap(tiny.build("bert-mlm"), "lora")
    texts, labels = tiny.opinions(40)
    dataset = TokenDataset(infilling.encode(texts, max_length=30).rows, labels)
    plan = dppeft.plan(num_examples=40, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = dppeft.make_private(
        model,
        optimizer,
        dataset,
        plan,
        collate_fn=collator_for(tokenizer),
        loss=infilling.loss(),
        ledger=tmp_path / "ledger.jsonl",
    )
    assert run.preflight.made_up
    for drawn in run.batches():
        run.step(drawn)
    assert run.spent().steps == 2


def test_the_trainer_takes_it(infilling: Infilling, tokenizer: Any, tmp_path: Path) -> None:
    texts, labels = tiny.opinions(24)
    trainer = dppeft.PrivateTrainer(
        dppeft.wrap(tiny.build("bert-mlm"), "lora"),
        TrainingArguments(
            str(tmp_path), max_steps=1, report_to=[], remove_unused_columns=False, use_cpu=True
        ),
        train_dataset=TokenDataset(infilling.encode(texts, max_length=30).rows, labels),
        processing_class=tokenizer,
        privacy=dppeft.Privacy(
            noise_multiplier=1.0,
            delta=1e-3,
            batch_size=8,
            loss=infilling.loss(),
            ledger=tmp_path / "ledger.jsonl",
        ),
    )
    trainer.train()
    assert trainer.spent().steps == 1
    assert trainer._run.preflight.made_up


def test_it_learns_words(infilling: Infilling, tokenizer: Any) -> None:
    """Without noise, a method that trains everything tells praise from blame."""
    model, (texts, labels) = tiny.build("bert-mlm"), tiny.opinions(64)
    batch = collator_for(tokenizer)(infilling.encode(texts, max_length=30).rows)
    batch["labels"] = torch.tensor(labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        infilling.loss()(model, batch).mean().backward()
        optimizer.step()
    right = infilling.logits(model, batch)[:, :2].argmax(dim=1) == batch["labels"]
    assert float(right.float().mean()) > 0.9


# --- templates and rows ---------------------------------------------------------------------------


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def test_a_row_is_the_rendered_sentence(tokenizer: Any) -> None:
    infilling = Infilling(tokenizer, "{text:cut} very {mask}, {pair:lower}", ["bad", "good"])
    made = infilling.encode(["a film."], ["The plot"], max_length=30)
    expected = ids_of(tokenizer, "a film very [MASK], the plot")
    assert made.rows[0]["input_ids"] == expected
    assert expected[made.rows[0]["mask_position"]] == tokenizer.mask_token_id


def test_the_changes_of_a_text() -> None:
    pieces = Template("{text:bare}|{mask}|{pair:cut}").pieces
    assert [piece.fill("So it is . ?!") for piece in pieces if piece.field == "text"] == [
        "So it is"
    ]
    assert [piece.fill("So it is") for piece in pieces if piece.field == "pair"] == ["So it i"]
    assert Template("{pair:lower} {text} {mask}").pieces[0].fill("It") == "it"


def test_what_is_too_long_loses_its_end_and_the_template_stays(tokenizer: Any) -> None:
    infilling = Infilling(tokenizer, "{text} very {mask} {pair}", ["bad", "good"])
    made = infilling.encode(["film " * 20, "a"], ["plot plot", "plot"], max_length=10)
    assert made.truncated == 1
    expected = ids_of(tokenizer, "film film film film very [MASK] plot plot")
    assert made.rows[0]["input_ids"] == expected
    assert len(expected) == 10
    assert made.rows[1]["input_ids"] == ids_of(tokenizer, "a very [MASK] plot")
    with pytest.raises(ArgumentError, match="max_length=5 leaves no room .* at least 6"):
        infilling.encode(["a"], ["b"], max_length=5)


def test_special_tokens_in_a_text_are_text(infilling: Infilling, tokenizer: Any) -> None:
    (row,) = infilling.encode(["a [MASK] film [SEP]"], max_length=30).rows
    assert row["input_ids"].count(tokenizer.mask_token_id) == 1
    assert row["input_ids"][row["mask_position"]] == tokenizer.mask_token_id
    assert row["input_ids"].count(tokenizer.sep_token_id) == 1


@pytest.mark.parametrize(
    ("template", "words", "message"),
    [
        ("{text} is good", ["bad", "good"], r"Expected {mask} once .* found it 0 times"),
        ("{text} {mask} {mask}", ["bad", "good"], r"Expected {mask} once .* found it 2 times"),
        ("it is {mask}", ["bad", "good"], r"Expected {text} once"),
        ("{text} {mask} {label}", ["bad", "good"], r"Unknown place {label}"),
        ("{text:upper} {mask}", ["bad", "good"], r"Unknown place {text:upper}.*bare, cut, lower"),
        ("{text {mask}", ["bad", "good"], r"Template '{text {mask}'"),
        ("{text} {mask}", ["bad", "bad"], "is the same token as another"),
        ("{text} {mask}", ["bad", "terrible"], "'terrible' is 1 tokens .* one that is known"),
        ("{text} {mask}", ["bad", "very good"], "'very good' is 2 tokens"),
        ("{text} {mask}", ["bad"], "a label word for each class"),
    ],
)
def test_what_cannot_be_is_refused(
    template: str, words: list[str], message: str, tokenizer: Any
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Infilling(tokenizer, template, words)


def test_wrong_models_and_rows_are_refused(
    infilling: Infilling, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="is no masked language model"):
        infilling.check(tiny.build("bert"))
    prompts = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    prompted = peft.get_peft_model(tiny.build("bert-mlm"), prompts)
    with pytest.raises(UnsupportedModelError, match="puts tokens before the input"):
        infilling.check(prompted)
    own_loss = peft.get_peft_model(tiny.build("bert-mlm"), peft.AdaLoraConfig(total_step=10))
    with pytest.raises(UnsupportedModelError, match="a loss term of its own"):
        infilling.check(own_loss)
    with pytest.raises(ArgumentError, match="label_smoothing < 1"):
        infilling.loss(label_smoothing=1.0)
    odd = tiny.build("bert-mlm")
    odd.cls.predictions.transform = nn.Sequential(odd.cls.predictions.transform, nn.Tanh())
    infilling.check(odd)  # its parts in order are still its own
    with pytest.raises(ArgumentError, match="has no place {pair}, and the rows have two"):
        infilling.encode(["a"], ["b"], max_length=20)
    with pytest.raises(DataError, match="have no text"):
        infilling.encode(["a", " "], max_length=20)
    with pytest.raises(ArgumentError, match="has no 'mask_position'"):
        infilling.logits(tiny.build("bert-mlm"), tiny.make_batch("bert-mlm"))
    batch = batch_of(infilling, tokenizer) | {"labels": torch.tensor([0, 1, 2, 3])}
    with pytest.raises(DataError, match="outside 0 to 2"):
        infilling.loss()(tiny.build("bert-mlm"), batch)
    without = copy.deepcopy(tokenizer)
    without.mask_token = None
    with pytest.raises(ArgumentError, match="has no mask token"):
        Infilling(without, CUT, ["bad", "good"])


def test_a_head_that_only_looks_like_one_is_refused(infilling: Infilling) -> None:
    class Scaled(type(tiny.build("roberta-mlm").lm_head)):
        def forward(self, features: Tensor, **_: Any) -> Tensor:
            return 3 * super().forward(features)

    model = tiny.build("roberta-mlm")
    model.lm_head.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match="not those of its parts called in order"):
        infilling.check(model)
