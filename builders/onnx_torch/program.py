"""An ONNX graph as a torch module, exported as a torch program."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from onnx import ModelProto
from torch import Tensor

from builders.onnx_ops import reading
from builders.onnx_ops.graph import BoundGraph, known_operators
from builders.onnx_ops.reading import Body
from builders.onnx_ops.table import MOST_NUMBERS, Lookups
from builders.onnx_torch.arrays import DTYPES, NARROW, TORCH, asarray, dtype
from enginesmith.core.errors import ModelError
from enginesmith.core.types import BuildRequest

Given = TypeVar("Given")
Made = TypeVar("Made")


class OnnxModule(torch.nn.Module):
    """The graph as a module: `forward` takes its inputs' tensors in their order and gives a tuple of its outputs'.

    With `clamped` there is one more output, bool [n], false for each of the `faults` that occurred; the other outputs
    are valid only where all are true (see `onnx_ops.table.Lookups`).

    Floating-point constants are parameters (without gradients), others buffers. Raises ModelError on construction for
    an operator or attribute that is not in the table, and while running for what torch refuses; each names the node.
    """

    def __init__(self, body: Body, clamped: bool = False) -> None:
        super().__init__()
        self._clamped, self._told = clamped, _Told()
        self._program = BoundGraph(body, TORCH, folded=MOST_NUMBERS)
        self._attribute_of = dict(_safe_names(list(self._program.constants)))
        for name, safe_name in self._attribute_of.items():
            tensor = _call_named(f"constant {name!r}", asarray, self._program.constants.pop(name))
            if tensor.is_floating_point():
                self.register_parameter(safe_name, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(safe_name, tensor)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph on tensors in the order of its inputs. Raises ModelError for another number of them."""
        if len(inputs) != len(self._program.inputs):
            raise ModelError(f"the model takes {len(self._program.inputs)} inputs, not {len(inputs)}")
        tensors = {name: getattr(self, safe_name) for name, safe_name in self._attribute_of.items()}
        tensors.update(zip(self._program.inputs, inputs, strict=True))
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        lookups = Lookups(TORCH, self._clamped)
        with nullcontext() if device.type == "cpu" else device:
            outputs: Sequence[Tensor] = self._program.run(tensors, lookups)  # type: ignore[assignment]
        self._told.faults = tuple(lookups.faults)
        return (*outputs, torch.stack(lookups.inside)) if lookups.inside else tuple(outputs)  # type: ignore[arg-type]

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults that the last output is about, in words, as of the last run of `forward`; see `clamped`."""
        return self._told.faults


class _Told:
    """The faults of the last run; an object of its own, since torch.export restores a module's attributes."""

    faults: tuple[str, ...] = ()


def read(path: Path) -> Body:
    """A model on disk. Raises ModelError as `onnx_ops.read` does, and for types that torch has no operators for."""
    return _check_body(reading.read(path, known_operators(TORCH)), {})


def read_model(model: ModelProto) -> Body:
    """As `read`, of a model in memory."""
    return _check_body(reading.read_model(model, known_operators(TORCH)), {})


def _check_body(body: Body, outer_elements: Mapping[str, np.dtype[Any]]) -> Body:
    types = {**outer_elements, **body.elements}
    for name in (name for name in body.inputs if name in body.elements):
        _call_named(f"input {name!r}", dtype, types[name])
    for node in body.nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            for name in node.inputs:
                if name in types and types[name].name in NARROW:
                    raise ModelError(f"{node} reads {name!r} of 4 bits; dequantize it first")
        for body_part in node.bodies():
            _check_body(body_part, types)
    return body


def _call_named(title: str, run: Callable[[Given], Made], argument: Given) -> Made:
    """run(argument), with `title` in front of the message of a ModelError."""
    try:
        return run(argument)
    except ModelError as error:
        raise ModelError(f"{title}: {error}") from error


def _safe_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, a Python identifier for it), each of the latter once."""
    used_names: set[str] = set()
    for name in names:
        safe_name = prefix = "w_" + re.sub(r"\W", "_", name)
        count = 0
        while safe_name in used_names:
            count += 1
            safe_name = f"{prefix}_{count}"
        used_names.add(safe_name)
        yield name, safe_name


def ranges_of(request: BuildRequest) -> dict[str, tuple[int, int]]:
    """Dim -> its least and greatest size over all profiles. Raises ModelError for a dim of an input without any."""
    dim_ends: dict[str, list[int]] = {}
    specs = {spec.name: spec for spec in request.inputs}
    for profile in request.profiles:
        for name, low, _, high in profile.inputs:
            for dim, *bounds in zip(specs[name].shape, low, high, strict=True):
                if isinstance(dim, str):
                    dim_ends.setdefault(dim, []).extend(bounds)
    for spec in request.inputs:
        for dim in spec.shape:
            if isinstance(dim, str) and dim not in dim_ends:
                raise ModelError(f"input {spec.name!r}: dim {dim!r} has no range; add dims.{dim}.max")
    return {dim: (min(bounds), max(bounds)) for dim, bounds in dim_ends.items()}


def examples(request: BuildRequest) -> tuple[Tensor, ...]:
    """Zeros for each input, at sizes that no compiler takes for special: never 0 or 1 where a dim has others. Raises
    ModelError for a dtype that torch has no operators for."""
    ranges, factors = ranges_of(request), request.multiples
    sizes = {
        dim: high if low == high or high <= 2 else max(low, min(high, (low + high) // 2), 2)
        for dim, (low, high) in ranges.items()
    }
    sizes |= {dim: max(sizes[dim] // multiple * multiple, ranges[dim][0]) for dim, multiple in factors.items()}
    for spec in request.inputs:
        if spec.dtype not in DTYPES:
            raise ModelError(f"input {spec.name!r} is {spec.dtype}, for which torch has no operators; cast it to int64")
    return tuple(torch.zeros(spec.at(sizes), dtype=DTYPES[spec.dtype]) for spec in request.inputs)


def order_as_requested(body: Body, request: BuildRequest) -> Body:
    """The graph with its inputs and outputs in the request's order. Raises ModelError where they are not the same."""
    inputs = tuple(spec.name for spec in request.inputs)
    outputs = tuple(spec.name for spec in request.outputs)
    for kind, request_names, body_names in (("inputs", inputs, body.inputs), ("outputs", outputs, body.outputs)):
        if sorted(request_names) != sorted(body_names):
            raise ModelError(
                f"the model has the {kind} {sorted(body_names)}, the request {sorted(request_names)}; plan it again"
            )
    return replace(body, inputs=inputs, outputs=outputs)


def dim_of(name: str, low: int, high: int, multiple: int) -> torch.export.Dim:
    """A dim of torch's exporter from `low` to `high`: itself, or `multiple` times one of this name."""
    if multiple == 1:
        return torch.export.Dim(name, min=low, max=high)
    return multiple * torch.export.Dim(name, min=low // multiple, max=high // multiple)


def program_of(module: torch.nn.Module, request: BuildRequest) -> torch.export.ExportedProgram:
    """Export an `OnnxModule` with the request's dynamic dims. Raises ModelError, see `to_program`."""
    factors = request.multiples
    symbols = {
        name: dim_of(f"d{index}", low, high, factors.get(name, 1))
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
        dims_text = ", ".join(f"{symbol.__name__} is {name}" for name, symbol in symbols.items())
        raise ModelError(f"torch cannot export the graph with dynamic dims ({dims_text}): {error}") from error


def to_program(model: Path, request: BuildRequest) -> torch.export.ExportedProgram:
    """The model exported with the request's inputs, outputs and dynamic dims, in the request's order.

    There is one symbol for each named dim, from the least to the greatest size that any of the profiles allows. Raises
    ModelError for unsupported operators, and if an operator fixes the size of a dynamic dim.

    The compiler decides what an index out of range or an integer division by zero does; see `to_guarded_program`.
    """
    return program_of(OnnxModule(order_as_requested(read(model), request)).eval(), request)


def to_guarded_program(model: Path, request: BuildRequest) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """`to_program` for compilers whose code crashes or reads foreign memory at an index out of range, or crashes at an
    integer division by zero.

    Indices computed from data are clamped, and zero divisors become 1. If the graph has such operators, the program has
    one more output, bool [n]: false for each fault that occurred. The outputs are then invalid. The second result
    describes each fault and names its node.
    """
    module = OnnxModule(order_as_requested(read(model), request), clamped=True).eval()
    program = program_of(module, request)
    return program, module.faults
