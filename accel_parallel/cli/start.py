"""Entry point of the console script: what makes a verb start, and end, quickly."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the verb in `argv`, by default the process's own."""
    # Looking for plugins of pydantic reads the metadata of every installed package: 80 ms for each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    defer_metadata()
    # Importing makes many objects and no garbage: collecting meanwhile takes 7 % of the time of a short verb.
    gc.set_threshold(100_000)
    try:
        from accel_parallel.cli.app import run

        run(argv)
    except KeyboardInterrupt:  # while something is imported; the verbs answer it by themselves
        sys.exit(130)
    finally:
        # Nor is there anything to be found when the interpreter ends: its last collections take 12 %.
        gc.freeze()


def defer_metadata() -> None:
    """Let importlib.metadata, and with it the email package, be loaded only when it is used.

    pydantic imports a name of it for the plugins that are switched off: 30 ms of every start.
    """
    name = "importlib.metadata"
    if name in sys.modules:
        return

    def real() -> Any:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return importlib.import_module(name)

    module: Any = ModuleType(name)
    module.entry_points = lambda **groups: real().entry_points(**groups)
    # The import system itself asks for `__path__`.
    module.__getattr__ = lambda attribute: None if attribute == "__path__" else getattr(real(), attribute)
    sys.modules[name] = importlib.metadata = module
