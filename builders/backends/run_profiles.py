"""What a runtime tells about one run from the inside: the time of each node, and the shapes that it saw there.

A backend that can tell has the methods of `Profiling` besides those of `Backend`. Standard library only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from enginery.core.types import Engine, Shape, Tensors

# A tensor as it was seen: numpy's name of its type, and its shape.
Seen = tuple[str, Shape]


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that the runtime executes, after its own fusions.

    seconds: mean of a run, without what the profiler adds to it where that is known.
    inputs, outputs: as they were seen, weights included; empty where the runtime says only the time.
    """

    name: str
    op_type: str
    seconds: float
    inputs: tuple[Seen, ...] = ()
    outputs: tuple[Seen, ...] = ()


@dataclass(frozen=True)
class RunProfile:
    """The nodes of one run in the order of their execution.

    runs: that the times are means of.  seconds: of a whole run under the profiler, which itself takes time.
    """

    nodes: Sequence[NodeTime]
    runs: int
    seconds: float


@runtime_checkable
class Profiling(Protocol):
    """A backend that can time the nodes of its engines."""

    def load_runtime(self) -> None:
        """Import what opening an engine takes, so that the engine's own load can be timed without that."""
        ...

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """Open the engine with the runtime's profiler and run it so often. Raises as `Backend.open` and `run` do."""
        ...


@runtime_checkable
class DeviceMemory(Protocol):
    """A session whose engine lies in a device's own memory."""

    def used_bytes(self) -> int:
        """Bytes of that memory that are in use, by everybody."""
        ...


@runtime_checkable
class DeviceTimed(Protocol):
    """A session that can tell how long the device itself is busy with a run, by events on it."""

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        """Seconds of each run on the device, without copies to it and from it. Raises as `Session.run` does."""
        ...


@runtime_checkable
class Prepared(Protocol):
    """A session that can give its runtime's own call, so that the runtime can be timed without what `run` adds."""

    def prepared(self, inputs: Tensors) -> Callable[[], object]:
        """A call of the runtime on inputs that were checked and run once before. Raises as `Session.run` does."""
        ...
