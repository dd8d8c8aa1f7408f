"""Opening a part of an engine, or a graph of one's own, as a backend opens its engines. Standard library only."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from enginery.core.types import Backend, Session


class PartOpening(Protocol):
    """A backend whose engines are ONNX graphs (`Capabilities.opens_parts`)."""

    def open_part(self, path: Path, *, as_written: bool = False) -> AbstractContextManager[Session]:
        """A session of the ONNX file `path`, with the options and threads of this backend's engines.

        as_written: run the graph without optimization. Raises ModelError when the file cannot be read.
        """
        ...


def opening_parts(backend: Backend) -> PartOpening | None:
    """The backend, where it opens parts of its engines; else None."""
    return cast("PartOpening", backend) if backend.capabilities.opens_parts else None
