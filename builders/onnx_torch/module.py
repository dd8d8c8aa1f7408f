"""A `torch.nn.Module` that runs an ONNX graph, node by node."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from builders.onnx_torch.arrays import NARROW, TORCH, asarray, dtype
from enginesmith.core.errors import ModelError

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
        for name, plain in self._attribute_of.items():
            tensor = _call_named(f"constant {name!r}", asarray, self._program.constants.pop(name))
            if tensor.is_floating_point():
                self.register_parameter(plain, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(plain, tensor)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph on tensors in the order of its inputs. Raises ModelError for another number of them."""
        if len(inputs) != len(self._program.inputs):
            raise ModelError(f"the model takes {len(self._program.inputs)} inputs, not {len(inputs)}")
        given = {name: getattr(self, plain) for name, plain in self._attribute_of.items()}
        given.update(zip(self._program.inputs, inputs, strict=True))
        device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
        lookups = Lookups(TORCH, self._clamped)
        with nullcontext() if device.type == "cpu" else device:
            made: Sequence[Tensor] = self._program.run(given, lookups)  # type: ignore[assignment]
        self._told.faults = tuple(lookups.faults)
        return (*made, torch.stack(lookups.inside)) if lookups.inside else tuple(made)  # type: ignore[arg-type]

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


def _check_body(body: Body, around: Mapping[str, np.dtype[Any]]) -> Body:
    elements = {**around, **body.elements}
    for name in (name for name in body.inputs if name in body.elements):
        _call_named(f"input {name!r}", dtype, elements[name])
    for node in body.nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            for name in node.inputs:
                if name in elements and elements[name].name in NARROW:
                    raise ModelError(f"{node} reads {name!r} of 4 bits; dequantize it first")
        for inner in node.bodies():
            _check_body(inner, elements)
    return body


def _call_named(what: str, run: Callable[[Given], Made], given: Given) -> Made:
    """run(given), with `what` in front of the message of a ModelError."""
    try:
        return run(given)
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error


def _safe_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, a Python identifier for it), each of the latter once."""
    used: set[str] = set()
    for name in names:
        plain = base = "w_" + re.sub(r"\W", "_", name)
        count = 0
        while plain in used:
            count += 1
            plain = f"{base}_{count}"
        used.add(plain)
        yield name, plain
