"""Public names of a package that are imported when they are first used, so that importing the package stays light."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. homes: the module of each public name; a name that is its last part is the module."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        module = import_module(homes[name])
        return module if homes[name].rpartition(".")[2] == name else getattr(module, name)

    return attribute
