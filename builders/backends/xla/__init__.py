"""XLA through JAX: `backend` is what the others see; `export` writes StableHLO, `session` compiles and runs it."""

from builders.backends.xla.backend import Xla

__all__ = ["Xla"]
