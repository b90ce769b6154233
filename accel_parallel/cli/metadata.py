"""importlib.metadata, put off until somebody uses it."""

import importlib
import sys
from types import ModuleType
from typing import Any


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
