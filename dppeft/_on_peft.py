"""Our methods join PEFT's registry as soon as PEFT is there, and not before: it is slow to import.

So ``PeftModel.from_pretrained`` reads an adapter of ours after ``import dppeft``, whatever the
order of the two imports.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def join_when_imported() -> None:
    """Registers now if PEFT is loaded, else right after its import."""
    if "peft" in sys.modules:
        _join()
    elif not any(isinstance(finder, _AfterPeft) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPeft())


def _join() -> None:
    own = sys.modules.get("dppeft.tuners.own")
    if own is not None and getattr(own.__spec__, "_initializing", False):
        return  # one of our tuners asked for PEFT and is not ready; wrap() and load() join, too
    from dppeft.tuners.joining import join_peft

    join_peft()


class _AfterPeft(MetaPathFinder):
    """Steps aside for the import of PEFT, and adds what follows it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "peft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_join(module: ModuleType) -> None:
                run(module)
                _join()

            loader.exec_module = run_and_join  # type: ignore[method-assign]
        return spec
