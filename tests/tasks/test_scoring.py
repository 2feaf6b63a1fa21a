"""Scores equal what their definitions give by hand; what cannot be scored is said first."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from dppeft.errors import ArgumentError, DataError
from tasks import scoring
from tasks.scoring import check_scoring, official_scores, reference_streams, score

# Two sources: one with three references of different lengths, one with a single one.
WRITTEN = ["the cat sat on the mat today", "a dog runs in the old park now"]
REFERENCES = [
    ["the cat sat on a mat", "today the cat sat on the mat", "a cat"],
    ["a dog runs in the park"],
]


def _runs(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def _bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Papineni et al. (2002), equations 2 and 3: counts clipped at the most in any reference."""
    logs, texts = [], [text.split() for text in written]
    lists = [[reference.split() for reference in of_one] for of_one in references]
    for size in range(1, 5):
        right = total = 0
        for words, of_one in zip(texts, lists, strict=True):
            for run, count in _runs(words, size).items():
                right += min(count, max(_runs(reference, size)[run] for reference in of_one))
                total += count
        logs.append(math.log(right / total))
    length = sum(len(words) for words in texts)
    nearest = sum(
        min((abs(len(r) - len(words)), len(r)) for r in of_one)[1]
        for words, of_one in zip(texts, lists, strict=True)
    )
    return 100 * min(1.0, math.exp(1 - nearest / length)) * math.exp(sum(logs) / 4)


def _f1(text: str, reference: str) -> float:
    """From the longest common subsequence (Lin, 2004), precision and recall weighing the same."""
    a, b = text.split(), reference.split()
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a):
        for j, other in enumerate(b):
            longest[i + 1][j + 1] = (
                longest[i][j] + 1 if word == other else max(longest[i][j + 1], longest[i + 1][j])
            )
    common = longest[-1][-1]
    return 2 * common / (len(a) + len(b))


def test_bleu_counts_every_reference_of_a_source() -> None:
    found = score(WRITTEN, REFERENCES)["BLEU"]
    assert found == pytest.approx(_bleu(WRITTEN, REFERENCES), rel=1e-6)
    assert found > _bleu(WRITTEN, [of_one[:1] for of_one in REFERENCES])


def test_a_missing_reference_counts_as_none_and_not_as_another_one() -> None:
    assert reference_streams(REFERENCES) == [
        [REFERENCES[0][0], REFERENCES[1][0]],
        [REFERENCES[0][1], None],
        [REFERENCES[0][2], None],
    ]
    # Edits to the nearest reference ("today" moved: 1; "old" and "now" deleted: 2), by the mean
    # length of a source's references (5 and 6; Snover et al., 2006).
    assert score(WRITTEN, REFERENCES)["TER"] == pytest.approx(100 * 3 / ((6 + 7 + 2) / 3 + 6))


def test_rouge_l_is_the_mean_of_the_best_f1() -> None:
    best = [
        max(_f1(text, reference) for reference in of_one)
        for text, of_one in zip(WRITTEN, REFERENCES, strict=True)
    ]
    assert score(WRITTEN, REFERENCES)["ROUGE-L"] == pytest.approx(100 * sum(best) / 2)


def test_nist_weighs_words_by_how_rare_they_are() -> None:
    # Seven different words, each 1 of 7; longer runs are certain once their beginning is known.
    text = "one two three four five six seven"
    assert score([text], [[text]])["NIST"] == pytest.approx(math.log2(7))
    # Half of the words wrong: half of the information.
    assert score(["one two x y"], [["one two three four"]])["NIST"] == pytest.approx(1.0)


def test_chrf_of_one_letter_words() -> None:
    # Characters: 2 of 3 right in both directions; pairs: "ab" of "ab", "bc" against "bx": 1 of 2;
    # triples: none; longer ones do not occur in either and do not count. No whole word is right,
    # but chrF without word n-grams, sacrebleu's default, looks at characters only.
    assert score(["abc"], [["abx"]])["chrF"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)


def test_a_text_equal_to_one_of_its_references_is_perfect_whatever_its_case() -> None:
    text = "Alimentum is a nice place in the city centre ."
    found = score([text.upper()], [["something else", text]])
    assert found["BLEU"] == pytest.approx(100)
    assert found["chrF"] == pytest.approx(100)
    assert found["ROUGE-L"] == pytest.approx(100)
    assert found["TER"] == 0


@pytest.mark.parametrize("text", ["", "nothing", "other things"])
def test_texts_too_short_for_long_runs_have_scores(text: str) -> None:
    found = score([text], [["a reference of several words"]])
    assert all(math.isfinite(value) for value in found.values())
    assert found["NIST"] == 0


def test_meteor_is_left_out_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "has_wordnet", lambda: False)
    assert list(score(WRITTEN, REFERENCES)) == ["BLEU", "chrF", "TER", "ROUGE-L", "NIST"]


def test_meteor_of_an_equal_text() -> None:
    if not scoring.has_wordnet():
        pytest.skip("nltk has no WordNet data here")
    text = "one two three four"
    # Banerjee and Lavie (2005): one chunk of 4 matches: penalty 0.5 / 4^3.
    assert score([text], [[text, "x"]])["METEOR"] == pytest.approx(1 - 0.5 / 4**3)


def test_what_cannot_be_scored_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"^2 of 3 sources .* no reference; the first is source 1 "):
        check_scoring([["a"], [], [" "]])
    with pytest.raises(DataError, match="nothing to score"):
        check_scoring([])
    with pytest.raises(DataError, match="1 texts and references of 2 sources"):
        score(["a"], REFERENCES)
    with pytest.raises(ArgumentError, match=r"--scorer .*none\.py is no file"):
        check_scoring(REFERENCES, tmp_path / "none.py")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nltk" else find(name)
    )
    with pytest.raises(DataError, match=r"need nltk, .*pip install 'dppeft\[generation\]'"):
        check_scoring(REFERENCES)


SCRIPT = """
import sys
assert sys.argv[1] == "-p"
references = [group.split("\\n") for group in open(sys.argv[2]).read().strip().split("\\n\\n")]
written = open(sys.argv[3]).read().splitlines()
assert len(references) == len(written) == 3, (references, written)
assert [len(group) for group in references] == [3, 1, 1]
assert written[2] == "."
print("SCORES:\\n==============")
print("BLEU: 0.5000\\nROUGE_L: 0.6250")
"""


def test_the_official_script_gets_one_group_per_source(tmp_path: Path) -> None:
    script = tmp_path / "measure_scores.py"
    script.write_text(SCRIPT)
    found, output = official_scores(script, [*WRITTEN, "\n"], [*REFERENCES, ["on\ntwo lines"]])
    assert found == {"BLEU": 0.5, "ROUGE_L": 0.625}
    assert "SCORES" in output


def test_a_script_that_fails_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "measure_scores.py"
    script.write_text("print('BLEU: 0.1')\nraise SystemExit('no java here')\n")
    found, output = official_scores(script, WRITTEN, REFERENCES)
    assert found == {}
    assert "no java here" in output
