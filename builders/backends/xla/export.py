"""Traces an ONNX graph with JAX and writes it down as StableHLO, for a platform that need not be here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from builders.backends.xla.file import write_engine
from builders.backends.xla.jax_arrays import JAX
from builders.onnx_ops.graph import BoundGraph, known_operators
from builders.onnx_ops.reading import read
from builders.onnx_ops.table import Lookups
from enginery.core.errors import ModelError
from enginery.core.types import BuildRequest, TensorSpec, Untyped

LARGEST_CONSTANT_BYTES = 256


def export(request: BuildRequest, model: Path, path: Path, matmul_precision: str) -> None:
    """Write the engine of `model` to `path`. Raises ModelError when the model or a dim of it cannot be compiled."""
    with jax.enable_x64(True), jax.default_matmul_precision(matmul_precision), _without_paths():
        program = BoundGraph(read(model, known_operators(JAX)), JAX, folded=sys.maxsize)
        # Arguments of the compiled function instead of parts of it.
        weights = {name: array for name, array in program.constants.items() if array.nbytes > LARGEST_CONSTANT_BYTES}
        for kind, there, asked in (
            ("inputs", program.inputs, request.inputs),
            ("outputs", program.outputs, request.outputs),
        ):
            if {*there} != (names := {spec.name for spec in asked}):
                raise ModelError(f"{model.name} has {kind} {sorted(there)}, not {sorted(names)}; export it again")
        order = [spec.name for spec in request.inputs]

        def run(held: list[Untyped], given: list[Untyped]) -> list[jax.Array]:
            values = dict(zip(weights, held, strict=True)) | dict(zip(order, given, strict=True))
            made = dict(zip(program.outputs, program.run(values, Lookups(JAX, clamped=False), JAX), strict=True))
            return [made[spec.name] for spec in request.outputs]

        held = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in weights.values()]
        platform = "cpu" if request.target.is_cpu else "cuda"
        exported = jax.export.export(jax.jit(run), platforms=[platform])(held, input_shapes(request))
        _check_outputs(request, exported.out_avals)
        write_engine(path, bytes(exported.serialize()), weights)


@contextmanager
def _without_paths() -> Iterator[None]:
    """Trace without the paths of Python files: they are this machine's, and would make other bytes on another."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def input_shapes(request: BuildRequest) -> list[jax.ShapeDtypeStruct]:
    """The inputs with a symbolic size for every dynamic dim, bounded as the profiles bound it."""
    ranges = dim_ranges(request)
    symbols = {name: f"d{index}" for index, name in enumerate(ranges)}  # a dim's own name may be no identifier
    limits = [
        f"{symbols[name]} {sign} {size}"
        for name, ends in ranges.items()
        for sign, size in zip((">=", "<="), ends, strict=True)
    ]
    scope = jax.export.SymbolicScope(limits)
    made = []
    for spec in request.inputs:
        words = ", ".join(_size(dim, ranges, symbols) for dim in spec.shape)
        shape = jax.export.symbolic_shape(words, scope=scope) if words else ()
        made.append(jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)))
    return made


def _size(dim: int | str, ranges: dict[str, tuple[int, int]], symbols: dict[str, str]) -> str:
    if isinstance(dim, int):
        return str(dim)
    low, high = ranges[dim]
    return str(low) if low == high else symbols[dim]


def dim_ranges(request: BuildRequest) -> dict[str, tuple[int, int]]:
    """The least and greatest size of each named dim over all profiles."""
    found: dict[str, list[int]] = {}
    for profile in request.profiles:
        shapes = {name: (low, high) for name, low, _, high in profile.inputs}
        for spec in request.inputs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str):
                    found.setdefault(dim, []).extend(shape[axis] for shape in shapes[spec.name])
    return {dim: (min(ends), max(ends)) for dim, ends in found.items()}


def _check_outputs(request: BuildRequest, avals: Untyped) -> None:
    """Raise ModelError when what was traced is not what the graph declares: a wrong type is a wrong operator."""
    for spec, aval in zip(request.outputs, avals, strict=True):
        if np.dtype(aval.dtype).name != spec.dtype or len(aval.shape) != len(spec.shape):
            got = f"{np.dtype(aval.dtype).name} of rank {len(aval.shape)}"
            raise ModelError(f"output {spec.name!r} is {got} where {_words(spec)} was declared; use onnxruntime")


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} of rank {len(spec.shape)}"
