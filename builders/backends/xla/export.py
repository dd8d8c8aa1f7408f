"""Traces an ONNX graph with JAX and writes it as StableHLO, for a platform that this machine need not have."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from builders.backends.request_checks import sizes
from builders.backends.xla.file import write_engine
from builders.backends.xla.jax_arrays import JAX
from builders.onnx_ops.graph import BoundGraph, known_operators
from builders.onnx_ops.reading import read
from builders.onnx_ops.table import Lookups
from enginesmith.core.errors import ModelError
from enginesmith.core.types import BuildRequest, Untyped

# Larger arrays are weights, which are passed to the program; smaller ones are compiled into it.
LARGEST_CONSTANT_BYTES = 256


def export(request: BuildRequest, model: Path, path: Path, matmul_precision: str) -> None:
    """Write the engine of `model` to `path`. Raises ModelError when the model or a dim of it cannot be compiled.

    matmul_precision: JAX's name for that of fp32 products.
    """
    with jax.enable_x64(True), jax.default_matmul_precision(matmul_precision), _without_paths():
        program = BoundGraph(read(model, known_operators(JAX)), JAX, folded=sys.maxsize)
        # Arguments of the compiled function instead of parts of it.
        weights = {name: array for name, array in program.constants.items() if array.nbytes > LARGEST_CONSTANT_BYTES}
        for kind, model_names, specs in (
            ("inputs", program.inputs, request.inputs),
            ("outputs", program.outputs, request.outputs),
        ):
            if {*model_names} != (names := {spec.name for spec in specs}):
                raise ModelError(f"{model.name} has {kind} {sorted(model_names)}, not {sorted(names)}; export it again")
        order = [spec.name for spec in request.inputs]

        def run(arrays: list[Untyped], inputs: list[Untyped]) -> list[jax.Array]:
            values = dict(zip(weights, arrays, strict=True)) | dict(zip(order, inputs, strict=True))
            output_arrays = dict(zip(program.outputs, program.run(values, Lookups(JAX, clamped=False)), strict=True))
            return [output_arrays[spec.name] for spec in request.outputs]

        weight_shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in weights.values()]
        platform = "cpu" if request.target.is_cpu else "cuda"
        exported_program = jax.export.export(jax.jit(run), platforms=[platform])(weight_shapes, input_shapes(request))
        for spec, aval in zip(request.outputs, exported_program.out_avals, strict=True):
            if np.dtype(aval.dtype).name != spec.dtype or len(aval.shape) != len(spec.shape):  # a wrong operator
                actual = f"{np.dtype(aval.dtype).name} of rank {len(aval.shape)}"
                declared_type = f"{spec.dtype} of rank {len(spec.shape)}"
                raise ModelError(
                    f"output {spec.name!r} is {actual} where {declared_type} was declared; use onnxruntime"
                )
        write_engine(path, bytes(exported_program.serialize()), weights)


@contextmanager
def _without_paths() -> Iterator[None]:
    """Trace without the paths of Python files, which differ between machines and would be part of the engine."""
    name = "jax_traceback_in_locations_limit"
    old_value = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, old_value)


def input_shapes(request: BuildRequest) -> list[jax.ShapeDtypeStruct]:
    """The inputs, with a symbolic size within the profiles' bounds for every dim that has more than one size."""
    ranges, factors = sizes(request), request.multiples
    # 'd0' and so on: a dim's own name may be no identifier
    symbols = {dim: f"{factors[dim]}*d{i}" if dim in factors else f"d{i}" for i, dim in enumerate(ranges)}
    dim_texts = {dim: str(low) if low == high else symbols[dim] for dim, (low, high) in ranges.items()}
    bounds = [
        (f"d{i}", [end // factors.get(dim, 1) for end in extent]) for i, (dim, extent) in enumerate(ranges.items())
    ]
    constraints = [f"{dim} {limit}" for dim, (low, high) in bounds for limit in (f">= {low}", f"<= {high}")]
    scope = jax.export.SymbolicScope(constraints)
    shape_structs = []
    for spec in request.inputs:
        shape_text = ", ".join(dim_texts[dim] if isinstance(dim, str) else str(dim) for dim in spec.shape)
        shape = jax.export.symbolic_shape(shape_text, scope=scope) if shape_text else ()
        shape_structs.append(jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)))
    return shape_structs
