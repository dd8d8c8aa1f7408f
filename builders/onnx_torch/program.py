"""Exports a module with the dynamic dimensions of a build request."""

from dataclasses import replace

import torch
from torch import Tensor

from builders.onnx_ops.reading import Body
from enginesmith.core.errors import ModelError
from enginesmith.core.types import BuildRequest

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
}


def ranges_of(request: BuildRequest) -> dict[str, tuple[int, int]]:
    """Dim -> its least and greatest size over all profiles. Raises ModelError for a dim of an input without any."""
    found: dict[str, list[int]] = {}
    specs = {spec.name: spec for spec in request.inputs}
    for profile in request.profiles:
        for name, low, _, high in profile.inputs:
            for dim, *ends in zip(specs[name].shape, low, high, strict=True):
                if isinstance(dim, str):
                    found.setdefault(dim, []).extend(ends)
    for spec in request.inputs:
        for dim in spec.shape:
            if isinstance(dim, str) and dim not in found:
                raise ModelError(f"input {spec.name!r}: dim {dim!r} has no range; add dims.{dim}.max")
    return {dim: (min(ends), max(ends)) for dim, ends in found.items()}


def examples(request: BuildRequest) -> tuple[Tensor, ...]:
    """Zeros for each input, at sizes that no compiler takes for special: never 0 or 1 where a dim has others."""
    ranges, every = ranges_of(request), request.multiples
    sizes = {
        dim: high if low == high or high <= 2 else max(low, min(high, (low + high) // 2), 2)
        for dim, (low, high) in ranges.items()
    }
    sizes |= {dim: max(sizes[dim] // multiple * multiple, ranges[dim][0]) for dim, multiple in every.items()}
    for spec in request.inputs:
        if spec.dtype not in _DTYPES:
            raise ModelError(f"input {spec.name!r} is {spec.dtype}, for which torch has no operators; cast it to int64")
    return tuple(torch.zeros(spec.at(sizes), dtype=_DTYPES[spec.dtype]) for spec in request.inputs)


def order_as_requested(body: Body, request: BuildRequest) -> Body:
    """The graph with its inputs and outputs in the request's order. Raises ModelError where they are not the same."""
    inputs = tuple(spec.name for spec in request.inputs)
    outputs = tuple(spec.name for spec in request.outputs)
    for kind, asked, have in (("inputs", inputs, body.inputs), ("outputs", outputs, body.outputs)):
        if sorted(asked) != sorted(have):
            raise ModelError(f"the model has the {kind} {sorted(have)}, the request {sorted(asked)}; plan it again")
    return replace(body, inputs=inputs, outputs=outputs)


def dim_of(name: str, low: int, high: int, multiple: int) -> torch.export.Dim:
    """A dim of torch's exporter from `low` to `high`: itself, or `multiple` times one of this name."""
    if multiple == 1:
        return torch.export.Dim(name, min=low, max=high)
    return multiple * torch.export.Dim(name, min=low // multiple, max=high // multiple)


def program_of(module: torch.nn.Module, request: BuildRequest) -> torch.export.ExportedProgram:
    """Export an `OnnxModule` with the request's dynamic dims. Raises ModelError, see `onnx_torch.to_program`."""
    every = request.multiples
    symbols = {
        name: dim_of(f"d{index}", low, high, every.get(name, 1))
        for index, (name, (low, high)) in enumerate(ranges_of(request).items())
        if low != high
    }
    shapes = tuple(
        {axis: symbols[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str) and dim in symbols}
        for spec in request.inputs
    )
    try:
        return torch.export.export(module, examples(request), dynamic_shapes=(shapes,), strict=False)
    except ModelError:
        raise
    except Exception as error:  # torch raises classes of many modules for constraints that do not hold
        dims = ", ".join(f"{symbol.__name__} is {name}" for name, symbol in symbols.items())
        raise ModelError(f"torch cannot export the graph with dynamic dims ({dims}): {error}") from error
