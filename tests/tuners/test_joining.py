"""Our tuners in PEFT's registry, whichever is imported first; a failure names PEFT's version."""

from __future__ import annotations

import subprocess
import sys

import peft
import pytest
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.utils import PeftType

import dppeft
from dppeft.tuners.joining import join_peft
from tests import tiny

OURS = ("adapter", "compacter", "rgp")


@pytest.mark.parametrize("name", OURS)
def test_peft_knows_our_methods(name: str) -> None:
    kind = PeftType(name.upper())
    message = f"PEFT {peft.__version__} keeps its names in another way: see tuners/joining.py"
    assert kind is PeftType[name.upper()] is getattr(PeftType, name.upper()), message
    assert kind in PEFT_TYPE_TO_CONFIG_MAPPING, message
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[kind]
    assert PEFT_TYPE_TO_PREFIX_MAPPING[kind] == tuner.prefix, message
    assert name in dppeft.methods()


def test_joining_twice_changes_nothing() -> None:
    before = dict(PEFT_TYPE_TO_CONFIG_MAPPING)
    join_peft()
    assert before == PEFT_TYPE_TO_CONFIG_MAPPING
    assert len({kind.value for kind in PeftType}) == len(list(PeftType))


@pytest.mark.parametrize("order", ["import dppeft, peft", "import peft, dppeft"])
def test_either_import_order(order: str) -> None:
    code = f"{order}\nfrom peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as m\nassert 'RGP' in m"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_dppeft_alone_loads_nothing() -> None:
    code = "import dppeft, sys; assert not {'peft', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", OURS)
def test_plain_peft_builds_them_from_a_configuration(name: str) -> None:
    """Without ``wrap``: default targets come from the model, whose head PEFT is told."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name.upper())](modules_to_save=["classifier"])
    model = peft.get_peft_model(tiny.build("bert"), config)
    trained, every = model.get_nb_trainable_parameters()
    assert 0 < trained < every
    assert model(**tiny.make_batch("bert")).logits.shape == (4, 3)


@pytest.mark.parametrize("name", OURS)
def test_two_adapters_side_by_side_and_one_deleted(name: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), name)).eval()
    batch = tiny.make_batch("bert")
    first = model(**batch).logits
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name.upper())]
    model.add_adapter("other", kind(modules_to_save=["classifier"]))
    assert (model(**batch).logits == first).all()
    model.set_adapter("other")
    assert not (model(**batch).logits == first).all()
    model.set_adapter("default")
    assert (model(**batch).logits == first).all()
    model.delete_adapter("other")
    assert (model(**batch).logits == first).all()


def test_they_generate() -> None:
    for name in OURS:
        model = dppeft.wrap(tiny.build("gpt2"), name).eval()
        ids = tiny.make_batch("gpt2", batch_size=1)["input_ids"]
        assert (
            model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
        )
