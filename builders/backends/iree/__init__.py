"""IREE: `backend` is what the rest of the house sees; `compile` builds, `session` runs."""

from builders.backends.iree.backend import Iree

__all__ = ["Iree"]
