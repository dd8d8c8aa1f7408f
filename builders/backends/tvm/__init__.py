"""Apache TVM: `backend` is what the other packages see; `compile` builds and runs."""

from builders.backends.tvm.backend import Tvm

__all__ = ["Tvm"]
