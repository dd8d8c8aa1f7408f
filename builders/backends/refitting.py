"""New weights for an engine, without a build: what a backend that can do that offers.

A backend whose engines leave their weights out says so (`Weights`); whoever opens such an engine gives the ONNX model
with the weights along (`Engine.weights`). Standard library only.
"""

from pathlib import Path
from typing import Protocol, cast

from enginery.core.types import Backend, BuildRequest, Engine


class Refitting(Protocol):
    """A backend that can give an engine other weights (`Capabilities.refits`). Whether a model differs in its weights
    alone is asked before (`builders.onnx_graphs.structure`)."""

    def refits(self, request: BuildRequest) -> str | None:
        """Why an engine of this request takes no other weights; None when it does. Imports no compiler."""
        ...

    def refit_needs_gpu(self) -> bool:
        """Whether `refit` loads the engine, and so needs a GPU that runs it."""
        ...

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """The engine of `request` under `workdir`: the kernels of `engine` with the weights of `model`.

        Raises EngineryError when the compiler does not take them.
        """
        ...


def get_refitting(backend: Backend) -> Refitting | None:
    """The backend, where it gives engines other weights; else None."""
    return cast("Refitting", backend) if backend.capabilities.refits else None
