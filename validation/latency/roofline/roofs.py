"""The limits of this machine (roofs), measured with the engine's own runtime, threads and process (Williams, Waterman &
Patterson, "Roofline", CACM 52, 2009).

Operations a second: a product of square matrices for each dtype. Bytes a second: the addition of a number to an array
(as STREAM's Scale, McCalpin 1995: one array is read and one written), of arrays larger than every cache and of arrays
that fit one. Overhead: the time of a run that does next to nothing, and of one more node in it.

A roof is the best of several tries; overheads are medians, as the times that they explain are.
"""

import itertools
import statistics
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.breakdown import Roofs, product_dtype
from enginesmith.core.types import Session, Tensors
from validation.latency.measurement.loop import latencies

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

Opener = Callable[[Path], AbstractContextManager[Session]]

SIDE = 512
NODES = 64
CACHED_BYTES = 256 << 10
CHAIN = 16
# The size of the last-level cache where it is not known, and of the largest array that is allocated to exceed it.
_CACHE_BYTES, _MOST_BYTES = 32 << 20, 64 << 20
_OPSET, _IR = 20, 10
_LEAST = 3


def measure_roofs(opens: Opener, workdir: Path, dtypes: Collection[str], seconds: float = 0.02) -> Roofs:
    """Measure each limit for about `seconds`. opens: opens an ONNX file as the engine's runtime does.

    workdir: for the ONNX files.  dtypes: that the engine computes in; float32 is always measured.
    Raises what `opens` raises.
    """
    rates = {}
    for kind in sorted({"float32", *map(product_dtype, dtypes)}):
        model, inputs = _product(kind)
        rates[kind] = 2.0 * SIDE**3 / _best(opens, model, inputs, workdir, seconds)
    cache = last_level_cache()
    long, short = np.ones(min(cache, _MOST_BYTES) // 4, np.float32), np.ones(CACHED_BYTES // 4, np.float32)
    one = np.ones(1, np.float32)
    memory = 2 * long.nbytes / _best(opens, _chain(1), {"x": long, "c": one}, workdir, seconds)
    run_1, run_n = (
        float(statistics.median(_times(opens, _chain(count), {"x": one, "c": one}, workdir, seconds / 2)))
        for count in (1, NODES)
    )
    node = max((run_n - run_1) / (NODES - 1), 1e-9)
    chained = _best(opens, _chain(CHAIN), {"x": short, "c": one}, workdir, seconds)
    moved = 2 * short.nbytes * CHAIN
    busy = max(chained - max(run_1 - node, 0.0) - CHAIN * node, 0.25 * chained)
    cached = float(max(moved / busy, memory))
    return Roofs(rates, memory, cached, cache // 2, max(run_1 - node, 0.0), node)


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core (sysfs), or 32 MiB where it is not known."""
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdecimal():
            found.append(int(text.rstrip("KM")) * scale)
    return max(found, default=_CACHE_BYTES)


def _best(opens: Opener, model: "ModelProto", inputs: Tensors, workdir: Path, seconds: float) -> float:
    return float(_times(opens, model, inputs, workdir, seconds).min())


def _times(opens: Opener, model: "ModelProto", inputs: Tensors, workdir: Path, seconds: float) -> Array:
    path = workdir / "roof.onnx"
    path.write_bytes(model.SerializeToString())
    with opens(path) as session:
        session.run(inputs)
        call = session.prepare_call(inputs) or partial(session.run, inputs)
        return latencies(call, seconds, _LEAST)


def _product(kind: str) -> tuple["ModelProto", Tensors]:
    """A model of a product with a constant square matrix, as a layer has, and its inputs."""
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(0)
    if kind == "int8":
        left, right = rng.integers(0, 255, (SIDE, SIDE), np.uint8), rng.integers(-127, 127, (SIDE, SIDE), np.int8)
        node, result = helper.make_node("MatMulInteger", ["x", "w"], ["y"]), "int32"
    else:
        left, right = (rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(2))
        node, result = helper.make_node("MatMul", ["x", "w"], ["y"]), "float32"
    model = _model([node], {"x": left}, "y", result)
    model.graph.initializer.append(numpy_helper.from_array(right, "w"))
    return model, {"x": left}


def _chain(count: int) -> "ModelProto":
    """A model of `count` additions of a number, each to the result of the one before."""
    from onnx import helper

    names = ["x", *(f"t{index}" for index in range(1, count)), "y"]
    nodes = [helper.make_node("Add", [a, "c"], [b]) for a, b in itertools.pairwise(names)]
    one = np.ones(1, np.float32)
    return _model(nodes, {"x": one, "c": one}, "y", "float32")


def _model(nodes: "list[NodeProto]", inputs: Tensors, output: str, result: str) -> "ModelProto":
    """A model of these nodes whose sizes are all dynamic. result: the dtype of its output."""
    from onnx import helper

    def describe_tensor(name: str, dtype: str, rank: int) -> "ValueInfoProto":
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(rank)])

    given = [describe_tensor(name, str(array.dtype), array.ndim) for name, array in inputs.items()]
    rank = next(iter(inputs.values())).ndim
    graph = helper.make_graph(nodes, "roof", given, [describe_tensor(output, result, rank)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
