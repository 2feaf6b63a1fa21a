"""How near written texts come to their references.

BLEU, chrF, TER (sacrebleu) and ROUGE-L (rouge-score: for each text the best F1 over its references,
then the mean; punctuation does not count) are in percent; NIST (nltk, with the length of the
best-matching reference) has a scale of its own; METEOR (nltk, the mean over texts) is between 0 and
1. More is better, but for TER. Case is ignored, as mteval does. METEOR needs WordNet's data
(``nltk.download("wordnet")``) and is left out without it. CIDEr is left out: no maintained library
has it. All of them differ a little from the E2E challenge's own script: for figures beside
published ones pass that script (``official_scores``).
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dppeft.errors import ArgumentError, DataError

LIBRARIES = ("sacrebleu", "rouge_score", "nltk")
Texts = Sequence[str]
TextLists = Sequence[Sequence[str]]  # the references of each text


def check_scoring(references: TextLists, scorer: Path | None = None) -> None:
    """All that can be wrong with scoring, said before anything is spent.

    Args:
        references: of each source.
        scorer: the official script, or None.

    Raises:
        DataError: a library is missing, there is nothing to score, or a source has no reference.
        ArgumentError: no such script.
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"Scores need {', '.join(missing)}, which is not installed: pip install "
            "'dppeft[generation]'."
        )
    if not references:
        raise DataError("There is nothing to score: no sources. Check the file to report on.")
    bare = [number for number, texts in enumerate(references) if not any(t.strip() for t in texts)]
    if bare:
        raise DataError(
            f"{len(bare)} of {len(references)} sources to report on have no reference; the first "
            f"is source {bare[0]} (from 0). Add references, or leave those sources out."
        )
    if scorer is not None and not scorer.is_file():
        raise ArgumentError(
            f"--scorer {scorer} is no file. Pass the path of measure_scores.py of the E2E "
            "challenge's metrics."
        )


def score(written: Texts, references: TextLists) -> dict[str, float]:
    """Metric -> value over all texts; see the module for units and for what is left out.

    Args:
        written: one text for each source.
        references: at least one text for each source; how many may differ.

    Raises:
        DataError: as ``check_scoring``, or the numbers of texts and of lists differ.
    """
    check_scoring(references)
    if len(written) != len(references):
        raise DataError(
            f"{len(written)} texts and references of {len(references)} sources: give one text for "
            "each source."
        )
    found = {**_sacrebleu(written, references), "ROUGE-L": _rouge_l(written, references)}
    found["NIST"] = _nist(written, references)
    meteor = _meteor(written, references)
    return found if meteor is None else {**found, "METEOR": meteor}


def reference_streams(references: TextLists) -> list[list[str | None]]:
    """Reference ``k`` of every source, for each ``k``: None where a source has fewer."""
    most = max(len(texts) for texts in references)
    return [[texts[k] if k < len(texts) else None for texts in references] for k in range(most)]


def _sacrebleu(written: Texts, references: TextLists) -> dict[str, float]:
    from sacrebleu.metrics import BLEU, CHRF, TER

    # force: the rows may be tokenised already, which is no mistake here.
    metrics = {
        "BLEU": BLEU(lowercase=True, force=True),
        "chrF": CHRF(lowercase=True),
        "TER": TER(case_sensitive=False),
    }
    streams = reference_streams(references)
    return {
        name: float(metric.corpus_score(list(written), streams).score)
        for name, metric in metrics.items()
    }


def _rouge_l(written: Texts, references: TextLists) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return 100 * statistics.fmean(
        max(scorer.score(reference, text)["rougeL"].fmeasure for reference in of_one)
        for text, of_one in zip(written, references, strict=True)
    )


def _words(text: str) -> list[str]:
    """Words and punctuation in lower case, as for BLEU."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()(text.lower()).split()


def _nist(written: Texts, references: TextLists) -> float:
    from nltk.translate.nist_score import corpus_nist

    texts = [_words(text) for text in written]
    # An order that no text is long enough for has no precision: nltk would divide by zero.
    orders = min(5, max(len(words) for words in texts))
    if orders == 0:
        return 0.0
    lists = [[_words(reference) for reference in of_one] for of_one in references]
    return float(corpus_nist(lists, texts, n=orders))


def has_wordnet() -> bool:
    """Whether nltk finds WordNet's data on this machine. Nothing is downloaded."""
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return False
    return True


def _meteor(written: Texts, references: TextLists) -> float | None:
    if not has_wordnet():
        return None
    from nltk.translate.meteor_score import meteor_score

    return statistics.fmean(
        meteor_score([_words(reference) for reference in of_one], _words(text))
        for text, of_one in zip(written, references, strict=True)
    )


def official_scores(
    scorer: Path, written: Texts, references: TextLists
) -> tuple[dict[str, float], str]:
    """What the E2E challenge's ``measure_scores.py`` says, and all that it printed.

    It runs with this Python and with its option ``-p``: its Perl part stays unused, its METEOR
    still needs Java. BLEU, ROUGE_L and METEOR are its fractions of 1.

    Args:
        scorer: path of the script.
        written: one text for each source.
        references: of each source.

    Returns:
        Metric -> value, empty where the script failed, and its output: what was trained is not
        lost for a scorer that is not set up.
    """
    with tempfile.TemporaryDirectory() as folder:
        system, truth = Path(folder) / "written.txt", Path(folder) / "references.txt"
        system.write_text("".join(f"{_line(text)}\n" for text in written), encoding="utf-8")
        groups = ("\n".join(map(_line, of_one)) + "\n" for of_one in references)
        truth.write_text("\n".join(groups), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(scorer.resolve()), "-p", str(truth), str(system)],
            capture_output=True,
            text=True,
            check=False,
            cwd=scorer.resolve().parent,
        )
    output = done.stdout + (done.stderr if done.returncode else "")
    found = re.findall(r"^(\w+): ([0-9.]+)$", done.stdout, flags=re.MULTILINE)
    return ({} if done.returncode else {name: float(value) for name, value in found}), output


def _line(text: str) -> str:
    """On one line and never empty: an empty line would end a group."""
    return " ".join(text.split()) or "."
