"""PyTorch's ahead-of-time compiler: `backend` is what the rest of the house sees; `session` runs its packages."""

from builders.backends.aotinductor.backend import AotInductor

__all__ = ["AotInductor"]
