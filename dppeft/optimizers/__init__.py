"""What may be done with released gradients beyond plain Adam: all of it costs no privacy."""

from dppeft.optimizers.adam import PrivateAdam
from dppeft.optimizers.decay import AdamWTowardsStart, decay_groups, feeding_a_norm
from dppeft.optimizers.shrinkage import shrink
from dppeft.optimizers.snr import SignalToNoise, StepRecord, mean_ratio

__all__ = [
    "AdamWTowardsStart",
    "PrivateAdam",
    "SignalToNoise",
    "StepRecord",
    "decay_groups",
    "feeding_a_norm",
    "mean_ratio",
    "shrink",
]
