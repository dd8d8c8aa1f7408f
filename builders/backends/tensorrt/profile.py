"""TensorRT's layer profiler as `builders.backends.run_profiles` has it. Never run on a GPU: no machine here has one.

Tests check the names used here against the installed bindings. TensorRT tells names and times alone: no types and no
shapes, so nothing is said about what a layer must do.
"""

from collections.abc import Mapping

from builders.backends.run_profiles import NodeTime, RunProfile
from builders.backends.tensorrt.runtime.session import EngineSession
from enginery.core.types import Tensors
from enginery.core.untyped import Untyped


def profile_layers(trt: Untyped, session: EngineSession, inputs: Tensors, runs: int) -> RunProfile:
    """Times of each layer over `runs` runs, after a fifth more that are not counted. Raises as `session.run` does."""
    listener = _listener(trt)
    for _ in range(max(2, runs // 5)):
        session.run(inputs)
    session.listen(listener)
    for _ in range(runs):
        session.run(inputs)
    times: Mapping[str, list[float]] = listener.milliseconds
    nodes = [NodeTime(name, _kind(name), sum(each) / runs * 1e-3) for name, each in times.items()]
    return RunProfile(nodes, runs, sum(node.seconds for node in nodes))


def _listener(trt: Untyped) -> Untyped:
    class Listener(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.milliseconds: dict[str, list[float]] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.milliseconds.setdefault(layer_name, []).append(ms)

    return Listener()


def _kind(layer: str) -> str:
    """The operator in a layer's name, such as 'MatMul' in '/encoder/MatMul_3 + /encoder/Add'."""
    last = layer.partition(" + ")[0].rpartition("/")[2]
    return last.rstrip("0123456789").rstrip("_") or layer
