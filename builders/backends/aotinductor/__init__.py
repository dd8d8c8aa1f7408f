"""PyTorch's ahead-of-time compiler: `backend` is what the other packages see; `session` runs its packages."""

from builders.backends.aotinductor.backend import AotInductor

__all__ = ["AotInductor"]
