"""dppeft: fine-tune pretrained transformers on private data and share the small result."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dppeft import _on_peft

__version__ = "0.1.0"

# Public name -> the module that defines it. Loaded on first use, so that `import dppeft` and the
# command line's --help stay light.
_PUBLIC = {
    "ClippedSum": "dppeft._types",
    "DppeftError": "dppeft.errors",
    "Infilling": "dppeft.infilling",
    "MaskedTokenLoss": "dppeft.masked_tokens",
    "MethodInfo": "dppeft.tuners.registry",
    "AdaptiveClipping": "dppeft.privacy.adaptive",
    "Privacy": "dppeft.training.trainer",
    "PrivacyPlan": "dppeft.privacy.plan",
    "PrivateTrainer": "dppeft.training.trainer",
    "Spent": "dppeft._types",
    "UnsupportedModelError": "dppeft.errors",
    "clipped_sum": "dppeft.training.gradients",
    "epsilon": "dppeft.privacy.accounting",
    "export": "dppeft.sharing",
    "load": "dppeft.sharing",
    "make_private": "dppeft.training.run",
    "merge": "dppeft.sharing",
    "methods": "dppeft.tuners.registry",
    "noise_multiplier": "dppeft.privacy.accounting",
    "per_example_grads": "dppeft.training.gradients",
    "plan": "dppeft.privacy.plan",
    "preflight": "dppeft.training.gradients",
    "PreflightReport": "dppeft.clipping.preflight",
    "schedules": "dppeft.privacy.schedules",
    "wrap": "dppeft.wrapping",
}

_MODULES = {"schedules"}  # public as a whole, under their own name

_on_peft.join_when_imported()

__all__ = sorted([*_PUBLIC, "__version__"])

if TYPE_CHECKING:  # what a type checker and an editor see
    from dppeft._types import ClippedSum as ClippedSum
    from dppeft._types import Spent as Spent


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dppeft' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
