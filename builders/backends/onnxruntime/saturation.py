"""Whether a model's integer sums can saturate on a CPU without VNNI, and how to open it so that none does.

The kernels there add pairs of products in 16 bits. With factors of 255 and 64 a pair is 32,640, which 16 bits hold. So
the file decides: whether its int8 weights go beyond 64. A file whose weights do not is opened as it is.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import Error  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from builders.backends.onnxruntime.exact import Rewrite, make_exact
from builders.onnx_graphs.bodies import walk_graphs
from enginery.core.hardware.cpu_kinds import EXACT_SESSION
from enginery.core.untyped import Untyped

HIGHEST = 64  # 2 * 255 * 64 < 2**15
_UNREADABLE = (Error, ValueError, OSError, onnx.checker.ValidationError)


def exact_source(path: Path, options: Untyped) -> str | bytes:
    """What to open in the place of a file, so that no sum saturates: its path, or the bytes of a rewritten model.

    options: of the session; they get what that takes. Of a file that cannot be read, the path: ONNX Runtime says why.
    """
    import onnxruntime as ort

    try:
        model = onnx.load(path, load_external_data=False)
        if not may_saturate(model, path.parent):
            return str(path)
        options.add_session_config_entry(*EXACT_SESSION)
        # The option changes constants only, and nothing in a graph that runs as it is written.
        as_written = options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if as_written or not all(Rewrite(model).list_constant_factors()):
            return model.SerializeToString() if make_exact(model, path.parent) else str(path)
    except _UNREADABLE:  # over 2 GiB, too: then the option is all there is
        options.add_session_config_entry(*EXACT_SESSION)
    return str(path)


def file_may_saturate(path: Path) -> bool:
    """`may_saturate` of a file."""
    return may_saturate(onnx.load(path, load_external_data=False), path.parent)


def may_saturate(model: ModelProto, folder: Path) -> bool:
    """Whether an int8 tensor of a model holds more than 64 in magnitude, or is made while it runs.

    folder: of its external data; of that, int8 tensors alone are read. One number alone, as a zero point is, makes no
    pair.
    """
    if any(_beyond(tensor, folder) for tensor in _tensors(model.graph) if tensor.data_type == TensorProto.INT8):
        return True
    rewrite = Rewrite(model)
    return rewrite.quantizes_to_int8() or not all(rewrite.list_constant_factors())


def _beyond(tensor: TensorProto, folder: Path) -> bool:
    if np.prod(tensor.dims, dtype=np.int64) < 2:
        return False
    values = numpy_helper.to_array(tensor, str(folder))
    return bool(values.max() > HIGHEST or values.min() < -HIGHEST)


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """The constants of a graph and of the graphs within its nodes."""
    for inner in walk_graphs(graph):
        yield from inner.initializer
        yield from (item.t for node in inner.node for item in node.attribute if item.HasField("t"))
