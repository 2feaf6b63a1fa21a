"""The privacy card: what it claims follows from what was spent, and it leaks nothing."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import dppeft
from dppeft.errors import ArgumentError, CheckpointError
from dppeft.privacy.card import PrivacyCard, library_versions
from dppeft.privacy.ledger import Ledger, plan_header

PLAN = dppeft.plan(
    num_examples=10_000, batch_size=100, steps=20, delta=1e-5, noise_multiplier=1.0, max_grad_norm=3
)


def spent(**changes):
    values = {
        "epsilon": 1.23456789,
        "delta": 1e-5,
        "steps": 20,
        "sample_rate": 0.01,
        "noise_multiplier": 1.0,
        "accountant": "pld",
    }
    return dppeft.Spent(**{**values, **changes})


def card(**changes):
    return PrivacyCard.from_spent(
        spent(**changes),
        plan=PLAN,
        clipping="flat",
        seeded=False,
        looked_at_without_noise=["number of rows"],
    )


def test_every_fact_a_reader_needs_is_there():
    facts = card().to_dict()
    assert facts["guarantee"] is True
    assert facts["unit"] == "one row"
    assert facts["neighbour_relation"] == "add or remove"
    assert (facts["epsilon"], facts["delta"], facts["accountant"]) == (1.23456789, 1e-5, "pld")
    assert facts["sampler"].startswith("Poisson")
    assert (facts["sample_rate"], facts["noise_multiplier"], facts["steps"]) == (0.01, 1.0, 20)
    assert (facts["max_grad_norm"], facts["num_examples"]) == (3, 10_000)
    assert (facts["clipping"], facts["seeded"]) == ("flat", False)
    assert facts["looked_at_without_noise"] == ["number of rows"]
    assert {"dppeft", "torch", "opacus", "dp-accounting", "peft"} <= facts["versions"].keys()


def test_the_file_gives_an_equal_card_back(tmp_path):
    for one in (card(), PrivacyCard(), card(epsilon=math.inf), card().without_guarantee("why")):
        one.write(tmp_path)
        assert PrivacyCard.read(tmp_path) == one
    unbounded = PrivacyCard(max_grad_norm=math.inf)
    assert PrivacyCard.from_dict(json.loads(json.dumps(unbounded.to_dict()))) == unbounded


@pytest.mark.parametrize("one", [card(epsilon=math.inf), PrivacyCard(), card().without_guarantee()])
def test_G6_no_epsilon_is_no_guarantee_and_is_said_plainly(one):
    assert not one.guarantee
    assert one.to_dict()["epsilon"] is None
    assert one.to_dict()["guarantee"] is False
    assert "No privacy guarantee is claimed" in one.markdown()
    assert "differentially private" not in one.markdown()


def test_the_section_states_the_claim_and_never_rounds_it_down():
    text = card().markdown()
    assert text.startswith("## Privacy\n")
    assert "(1.2346, 1e-05)-differentially private for one row (add or remove)" in text
    assert "| epsilon | 1.2346 |" in text
    assert "(0.0001, 1e-05)" in card(epsilon=1e-9).markdown()
    assert "- number of rows" in text
    assert "| seeded | no |" in text


def test_H2_a_seeded_run_says_so_and_the_seed_is_nowhere(tmp_path):
    seed = 918273645
    secret = dppeft.privacy.noise.fresh_secret(seed)
    one = dataclasses.replace(card(), seeded=secret.seeded)
    one.write(tmp_path)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", plan_header(PLAN, seeded=secret.seeded))
    texts = [one.markdown(), ledger.path.read_text()]
    texts += [file.read_text() for file in tmp_path.iterdir()]
    for text in texts:
        assert str(seed) not in text
        assert secret.to_bytes()[1:].hex() not in text
    assert "came from a chosen seed" in one.markdown()
    assert one.to_dict()["seeded"] is True
    assert ledger.header["seeded"] is True


def test_without_guarantee_keeps_the_facts_and_tells_why():
    weaker = card().without_guarantee("Rows were added after training.")
    assert weaker.noise_multiplier == 1.0
    assert weaker.epsilon is None
    assert "Rows were added after training." in weaker.markdown()
    assert card().guarantee


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guarantee": True, "epsilon": None}, "says guarantee=True with epsilon=None"),
        ({"guarantee": False}, "changed by hand"),
        ({"epsilon": -1}, "epsilon >= 0"),
        ({"epsilon": "small"}, "Not a privacy card"),
        ({"delta": None}, "delta in"),
        ({"format": 9}, "format=9"),
        ({"epsilom": 1}, "unknown fields.*epsilom"),
    ],
)
def test_a_card_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        PrivacyCard.from_dict({**card().to_dict(), **change})


def test_files_that_are_no_card_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Cannot read the privacy card"):
        PrivacyCard.read(tmp_path)
    for content in ("no json", "[1]", "\x80"):
        (tmp_path / "privacy.json").write_text(content, encoding="latin-1")
        with pytest.raises(CheckpointError, match="privacy card"):
            PrivacyCard.read(tmp_path)


def test_a_card_cannot_claim_nonsense():
    for wrong in ({"epsilon": -0.1, "delta": 1e-5}, {"epsilon": math.nan, "delta": 1e-5}):
        with pytest.raises(ArgumentError, match="epsilon >= 0"):
            PrivacyCard(**wrong)
    with pytest.raises(ArgumentError, match=r"delta in \(0, 1\) beside epsilon=1, got delta=None"):
        PrivacyCard(epsilon=1.0)


def test_versions_are_those_installed():
    versions = library_versions()
    assert versions["dppeft"] == dppeft.__version__
    assert versions["torch"].startswith("2.")
