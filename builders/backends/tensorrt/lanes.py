"""Execution contexts, each with what is bound to it: one for each profile, or one for each shape with its CUDA graph.

A CUDA graph holds the shapes, addresses and the state of the context that it was captured from; changing these
afterwards is undefined. So each captured shape has a context and buffers of its own, and the first run of a shape is
not captured: it does the work that TensorRT defers until after a change of shapes (NVIDIA, TensorRT documentation,
"Working with CUDA Graphs"). Contexts take memory, so that only the shapes used last keep theirs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cuda import CudaGraph, Device
from enginesmith.core.types import Tensors, TensorSpec, Untyped

MOST_LANES = 16

Key = tuple[int, tuple[tuple[int, ...], ...]]


class Lane:
    """One execution context and what is bound to it.

    place: prefix of the names of its buffers.  captures: whether it replays a CUDA graph, and so runs at one shape.
    on_host: inputs whose values stay in the host's memory.  must: raises EnginesmithError for False.
    """

    def __init__(
        self,
        context: Untyped,
        device: Device,
        place: str,
        captures: bool,
        on_host: Set[str],
        must: Callable[[bool], None],
    ) -> None:
        self.context = context
        self._device, self._place, self._captures, self._on_host, self._must = device, place, captures, on_host, must
        self._graph: CudaGraph | None = None
        self._runs = 0
        self._results: dict[str, Array] = {}
        self._held: dict[str, Array] = {}

    def bind(self, inputs: Tensors, outputs: Sequence[TensorSpec]) -> None:
        """Copy the inputs to the GPU and make buffers for the outputs. Raises EnginesmithError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        if self._captures and self._runs:  # the context is as its graph wants it: shapes and addresses stay
            for name, array in arrays.items():
                self._device.put(self._place + name, array)
            self._results = {name: np.empty_like(array) for name, array in self._results.items()}
            return
        for name, array in arrays.items():
            self._must(self.context.set_input_shape(name, array.shape))
            if name in self._on_host:
                self._held[name], address = array, int(array.ctypes.data)
            else:
                address = self._device.put(self._place + name, array)
            self._must(self.context.set_tensor_address(name, address))
        self._results = {spec.name: self._output(spec) for spec in outputs}

    def go(self) -> None:
        """Put one run on the stream. Raises EnginesmithError."""
        if self._captures and self._runs == 1:
            try:
                self._graph = self._device.capture(self._enqueue)
            except EnginesmithError as error:
                reason = f"this engine cannot be captured as a CUDA graph: {error}"
                raise EnginesmithError(f"{reason}; set cuda_graphs: false") from error
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.launch()
        self._runs += 1

    def results(self) -> dict[str, Array]:
        """The outputs of the last run, copied from the GPU; to be called when the stream has come to its end."""
        for name, array in self._results.items():
            self._device.get(self._place + name, array)
        return self._results

    def close(self) -> None:
        """Release the graph and the context, and the buffers if no other lane uses them."""
        if self._graph is not None:
            self._graph.close()
        if self._place:
            self._device.forget(self._place)
        self.context = None

    def _enqueue(self) -> None:
        self._must(self.context.execute_async_v3(self._device.stream))

    def _output(self, spec: TensorSpec) -> Array:
        """A host array of the shape that TensorRT infers, with its device buffer bound."""
        shape = tuple(self.context.get_tensor_shape(spec.name))
        if min(shape, default=0) < 0:
            raise EnginesmithError(
                f"output {spec.name!r} has a shape that depends on data, {shape}; use another backend"
            )
        array = np.empty(shape, spec.dtype)
        address = self._device.buffer(self._place + spec.name, array.nbytes)
        self._must(self.context.set_tensor_address(spec.name, address))
        return array


class Lanes:
    """At most `MOST_LANES` lanes; for one more, the one that was used longest ago is closed. make: makes one of a key
    and its running number."""

    def __init__(self, make: Callable[[Key, int], Lane]) -> None:
        self._make = make
        self._lanes: OrderedDict[Key, Lane] = OrderedDict()
        self._made = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def at(self, key: Key) -> Lane:
        """The lane of this profile and these shapes."""
        if key not in self._lanes:
            if len(self._lanes) >= MOST_LANES:
                self._lanes.popitem(last=False)[1].close()
            self._lanes[key] = self._make(key, self._made)
            self._made += 1
        self._lanes.move_to_end(key)
        return self._lanes[key]

    def close(self) -> None:
        """Close every lane."""
        while self._lanes:
            self._lanes.popitem()[1].close()
