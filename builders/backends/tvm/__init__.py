"""Apache TVM: `backend` is what the rest of the house sees; `compile` builds, `session` runs."""

from builders.backends.tvm.backend import Tvm

__all__ = ["Tvm"]
