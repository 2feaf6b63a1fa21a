"""What may be done with released gradients beyond plain Adam: all of it costs no privacy."""

from dppeft.optimizers.adam import PrivateAdam
from dppeft.optimizers.shrinkage import shrink

__all__ = ["PrivateAdam", "shrink"]
