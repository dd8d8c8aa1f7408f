"""Graphs that compilers of native code have computed wrongly, or read in two ways; each with the request for it."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from builders.backends import discovery
from enginesmith.core.types import BuildRequest, ShapeProfile, TensorSpec
from tests.builders import graphs

FLOAT = TensorProto.FLOAT
NUMPY = {FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.BOOL: "bool", TensorProto.INT64: "int64"}


def request_for(backend, inputs, outputs, target="cpu", precision="fp32", sizes=(1, 4, 16)) -> BuildRequest:
    """The request of a `backend` for a graph's (name, type, shape) values; every named dim goes from 1 to 16."""
    specs = [
        tuple(TensorSpec(name, NUMPY[dtype], shape) for name, dtype, shape in values) for values in (inputs, outputs)
    ]
    named_dims = {dim for spec in specs[0] for dim in spec.shape if isinstance(dim, str)}
    min_dims, dims, max_dims = (dict.fromkeys(named_dims, size) for size in sizes)
    profile = ShapeProfile(tuple((spec.name, spec.at(min_dims), spec.at(dims), spec.at(max_dims)) for spec in specs[0]))
    return graphs.request(
        target,
        precision,
        backend.name,
        inputs=specs[0],
        outputs=specs[1],
        profiles=(profile,) if named_dims else (),
        options=discovery.options_of(backend),
        toolchain=discovery.toolchain_of(backend),
    )


def ran(backend, request, model, inputs, workdir):
    with backend.open(backend.build(request, model, workdir)) as session:
        return session.run(inputs)


def saved(path: Path, backend, nodes, inputs, outputs, weights=(), **changes):
    return graphs.save(path, nodes, inputs, outputs, weights), request_for(backend, inputs, outputs, **changes)


def odd_names(path, backend):
    """[seq-len, 4] -> [seq-len, 3]: a dim that reads as arithmetic, quotes, slashes, other alphabets."""
    node = helper.make_node("MatMul", ["in put/é", 'w"q'], ["o'ut:0"], name="n ode/ü")
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype("f")
    inputs, outputs = [("in put/é", FLOAT, ("seq-len", 4))], [("o'ut:0", FLOAT, ("seq-len", 3))]
    return saved(path, backend, [node], inputs, outputs, [('w"q', weight)])


def two_sizes(path, backend):
    """x [b, 4] + y [c, 4], where b = 1 means broadcasting."""
    inputs = [("x", FLOAT, ("b", 4)), ("y", FLOAT, ("c", 4))]
    return saved(path, backend, [helper.make_node("Add", ["x", "y"], ["z"])], inputs, [("z", FLOAT, ("d", 4))])


def doubles(path, backend):
    value = TensorProto.DOUBLE, ("b", 4)
    return saved(path, backend, [helper.make_node("Sqrt", ["x"], ["y"])], [("x", *value)], [("y", *value)])


def flags(path, backend):
    nodes = [helper.make_node("Not", ["x"], ["y"]), helper.make_node("Cast", ["x"], ["n"], to=TensorProto.INT64)]
    outputs = [("y", TensorProto.BOOL, ("b", 4)), ("n", TensorProto.INT64, ("b", 4))]
    return saved(path, backend, nodes, [("x", TensorProto.BOOL, ("b", 4))], outputs)


def positions(path, backend):
    """ids [b, s] -> table[0..s) + ids: how a transformer knows where its tokens stand."""
    weights = [("zero", np.array(0)), ("one", np.array(1)), ("table", np.arange(32, dtype="f").reshape(16, 2))]
    nodes = [
        helper.make_node("Shape", ["ids"], ["shape"], start=1, end=2),
        helper.make_node("Squeeze", ["shape"], ["size"]),
        helper.make_node("Range", ["zero", "size", "one"], ["position"], name="counting"),
        helper.make_node("Gather", ["table", "position"], ["place"]),
        helper.make_node("Cast", ["ids"], ["float"], to=FLOAT),
        helper.make_node("Unsqueeze", ["float", "last"], ["wide"]),
        helper.make_node("Add", ["wide", "place"], ["y"]),
    ]
    inputs, outputs = [("ids", TensorProto.INT64, ("b", "s"))], [("y", FLOAT, ("b", "s", 2))]
    return saved(path, backend, nodes, inputs, outputs, [*weights, ("last", np.array([2]))])
