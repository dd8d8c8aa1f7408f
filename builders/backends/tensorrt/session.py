"""Runs a TensorRT engine: execution contexts, their device memory, and the session over them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager

import numpy as np

from builders.backends.optional_methods import NodeTime, RunProfile
from builders.backends.tensorrt.library import Opening, builder_reason, refit
from enginesmith.arrays import Array, InputCheck
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cuda import CudaGraph, Device
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors, TensorSpec, Untyped

# Execution contexts, each with its bindings: one for each profile, or one for each shape with its CUDA graph.
#
# A CUDA graph holds the shapes, addresses and the state of the context that it was captured from; changing these
# afterwards is undefined. So each captured shape has a context and buffers of its own, and the first run of a shape is
# not captured: it does the work that TensorRT defers until after a change of shapes (NVIDIA, TensorRT documentation,
# "Working with CUDA Graphs"). Contexts take memory, so that only the shapes used last keep theirs.

# Maximum number of contexts that a session keeps.
MOST_LANES = 16

Key = tuple[int, tuple[tuple[int, ...], ...]]


class Lane:
    """One execution context and its bindings.

    place: prefix of its buffers' names.  captures: whether it replays a CUDA graph, so that it runs at one shape only.
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
        arrays = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        if self._captures and self._runs:  # a captured context keeps its shapes and addresses
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
        """Enqueue one run on the stream. Raises EnginesmithError."""
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
        """The outputs of the last run, copied from the GPU. Call it after all work on the stream has ended."""
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
    """At most `MOST_LANES` lanes; a new one closes the least recently used one. make: makes the lane for a key and a
    running number."""

    def __init__(self, make: Callable[[Key, int], Lane]) -> None:
        self._make = make
        self._lanes: OrderedDict[Key, Lane] = OrderedDict()
        self._made = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def at(self, key: Key) -> Lane:
        """The lane for a profile and shapes, made if there is none."""
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


# Opens and runs a TensorRT engine on this machine's GPU, and times its layers. Never run on a GPU.
#
# It calls libcuda by ctypes (`hardware.cuda`), which every machine that can run an engine has: a serving node needs
# neither torch nor cuda-python. Tests check every TensorRT name used here against the bindings of each release, and the
# order of the calls with stand-ins for TensorRT and libcuda.


@contextmanager
def open_engine(trt: Untyped, logger: Untyped, engine: Engine, opening: Opening) -> Iterator[Session]:
    """Load `engine` with the module `trt` and its logger `logger`.

    Raises EnginesmithError with TensorRT's message if it cannot be opened, UnavailableError without a driver.
    """
    with Device(opening.gpu) as device:
        logger.messages.clear()
        runtime = trt.Runtime(logger)
        cuda_engine = load(runtime, logger, engine, opening)
        if opening.stripped:
            if engine.weights is None:
                reason = f"{engine.path.name} has no weights of its own"
                raise EnginesmithError(f"{reason}; open it with the ONNX model it was made from")
            refit(trt, logger, cuda_engine, engine.weights)
        if opening.streamed_budget_bytes is not None:
            budget = opening.streamed_budget_bytes or cuda_engine.get_weight_streaming_automatic_budget()
            cuda_engine.weight_streaming_budget_v2 = min(budget, cuda_engine.streamable_weights_size)
        with closing(EngineSession(trt, engine.request, cuda_engine, device, logger, opening)) as session:
            yield session


def load(runtime: Untyped, logger: Untyped, engine: Engine, opening: Opening) -> Untyped:
    """The engine, deserialized. Raises EnginesmithError with TensorRT's message."""
    opening.prepare(runtime, engine)
    if opening.host_code:
        runtime.engine_host_code_allowed = True
    cuda_engine = runtime.deserialize_cuda_engine(engine.path.read_bytes())
    if cuda_engine is None:
        raise EnginesmithError(builder_reason(engine.path.name, engine.request.backend, logger.messages))
    return cuda_engine


class EngineSession(Session):
    """A loaded engine with an execution context for each of its profiles, or, with CUDA graphs, for each shape. Raises
    EnginesmithError for CUDA graphs of an engine whose inputs give shapes by their values."""

    def __init__(
        self, trt: Untyped, request: BuildRequest, loaded: Untyped, device: Device, logger: Untyped, opening: Opening
    ) -> None:
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._trt, self._request, self._loaded, self._device, self._logger = trt, request, loaded, device, logger
        self._graphs, self._own_graphs = opening.cuda_graphs, opening.own_graphs
        # TensorRT reads the values of these inputs to infer the shapes of others: they stay in the host's memory.
        host_location = trt.TensorLocation.HOST
        self._on_host = {spec.name for spec in self.inputs if loaded.get_tensor_location(spec.name) == host_location}
        self._profiler: Untyped = None
        self._check = InputCheck(request.inputs, request.profiles)
        self._lanes = Lanes(self._new_lane)
        shape_inputs = [spec.name for spec in self.inputs if self._graphs and loaded.is_shape_inference_io(spec.name)]
        if shape_inputs:
            raise EnginesmithError(
                f"input {shape_inputs[0]!r} decides shapes by its values, which a CUDA graph would keep from its first "
                f"run; set backends.{request.backend}.cuda_graphs: false"
            )

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """Run once. Raises DataError for arrays that fit no profile, EnginesmithError when the GPU fails."""
        lane = self._bind_inputs(inputs)
        lane.go()
        self._device.wait()
        return lane.results()

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        """How long the GPU takes for each of `runs` runs, without copies to it and from it. Raises as `run` does."""
        self.run(inputs)
        lane = self._bind_inputs(inputs)
        lane.go()
        self._device.wait()
        return [self._device.seconds(lane.go) for _ in range(runs)]

    def listen(self, profiler: Untyped) -> None:
        """Have TensorRT report the time of each layer to an `IProfiler` from now on."""
        self._profiler = profiler
        for lane in self._lanes:
            lane.context.profiler = profiler

    def used_bytes(self) -> int:
        """Bytes of GPU memory used by all processes, from the driver."""
        return self._device.used_bytes()

    def close(self) -> None:
        """Release contexts and graphs. Call it before the device is closed."""
        self._lanes.close()

    def _bind_inputs(self, inputs: Tensors) -> Lane:
        """The lane for these shapes, its inputs on the GPU."""
        profile = self._check(inputs).profile
        self._logger.messages.clear()
        shapes = tuple(inputs[spec.name].shape for spec in self.inputs) if self._graphs else ()
        lane = self._lanes.at((profile, shapes))
        lane.bind(inputs, self.outputs)
        return lane

    def _new_lane(self, key: tuple[int, Untyped], number: int) -> Lane:
        context = self._new_context()
        if context is None:
            raise EnginesmithError(builder_reason("an execution context", self._request.backend, self._logger.messages))
        if self._profiler is not None:
            context.profiler = self._profiler
        if self._request.profiles:
            self._must(context.set_optimization_profile_async(key[0], self._device.stream))
        prefix = f"{number}/" if self._graphs else ""
        return Lane(context, self._device, prefix, self._graphs, self._on_host, self._must)

    def _new_context(self) -> Untyped:
        # By default, a context holds memory for the largest profile instead of its own.
        strategies = self._trt.ExecutionContextAllocationStrategy
        strategy = strategies.ON_PROFILE_CHANGE if self._request.profiles else strategies.STATIC
        if not self._own_graphs:
            return self._loaded.create_execution_context(strategy)
        config = self._loaded.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.cuda_graph_strategy = self._trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return self._loaded.create_execution_context(config)

    def _must(self, is_done: bool) -> None:
        if not is_done:
            raise EnginesmithError(builder_reason("the engine", self._request.backend, self._logger.messages))


def profile_layers(trt: Untyped, session: EngineSession, inputs: Tensors, runs: int) -> RunProfile:
    """Mean time of each layer over `runs` runs, after a warm-up of a fifth as many runs (at least 2).

    TensorRT reports neither types nor shapes of a layer. Raises as `session.run` does.
    """

    class Listener(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.milliseconds: dict[str, list[float]] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.milliseconds.setdefault(layer_name, []).append(ms)

    listener = Listener()
    for _ in range(max(2, runs // 5)):
        session.run(inputs)
    session.listen(listener)
    for _ in range(runs):
        session.run(inputs)
    times: Mapping[str, list[float]] = listener.milliseconds
    nodes = [NodeTime(name, _kind(name), sum(layer_times) / runs * 1e-3) for name, layer_times in times.items()]
    return RunProfile(nodes, runs, sum(node.seconds for node in nodes))


def _kind(layer: str) -> str:
    """The operator in a layer's name, such as 'MatMul' in '/encoder/MatMul_3 + /encoder/Add'."""
    layer_name = layer.partition(" + ")[0].rpartition("/")[2]
    return layer_name.rstrip("0123456789").rstrip("_") or layer
