"""IREE: `backend` is what the other packages see; `compile` builds and runs."""

from builders.backends.iree.backend import Iree

__all__ = ["Iree"]
