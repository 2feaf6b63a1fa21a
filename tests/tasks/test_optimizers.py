"""The comparison of optimizers: every contestant takes private steps and is told apart."""

from __future__ import annotations

import torch

from tasks.optimizers import CONTESTANTS, RATES, Data, one
from tasks.warm_start import Features


def test_every_choice_of_every_contestant_trains_and_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2200, 16, generator=generator)
    labels = (features[:, 0] > 0).long().tolist()
    data = Data(
        train=Features(features[:2000], labels[:2000]),
        features=features[2000:],
        labels=labels[2000:],
    )
    found = {}
    for contestant in CONTESTANTS:
        options = list(contestant.grid())[1]
        value, done = one(data, options, epsilon=50.0, seed=0)
        assert done.run.spent().epsilon <= 50.0
        found[contestant.name] = value
        assert value > 0.8, contestant.name
    assert len({options["lr"] for c in CONTESTANTS for options in c.grid()}) == len(RATES)
    assert len(found) == len(CONTESTANTS) == 4
