"""Runs an ONNX graph node by node on the arrays of a library."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from builders.onnx_ops import operators  # noqa: F401 - fills the table
from builders.onnx_ops.reading import Body, Node
from builders.onnx_ops.table import (
    MOST_NUMBERS,
    ON_NUMBERS,
    OPERATORS,
    Array,
    ArrayLibrary,
    Known,
    Lookups,
    NumpyArray,
    Operator,
    Result,
    Value,
    known_constant,
)
from enginesmith.core.errors import ModelError

Values = dict[str, Value]
_REQUIRED = inspect.Parameter.empty


def known_operators(xp: ArrayLibrary) -> frozenset[str]:
    """Names of the ONNX operators that the conversion to this library knows, `If` included."""
    return frozenset(OPERATORS) - xp.lacks | {"If"}


class BoundGraph:
    """A graph whose nodes are bound to their operators; nodes that depend on small constants alone are computed.

    inputs, outputs: names, in order.  constants: name -> array, of those that are read.  folded: a node is computed
    here if its constants have at most this many numbers in total, and its results too.

    Raises ModelError, naming the node, for an operator or attribute that is not in the table.
    """

    def __init__(self, body: Body, xp: ArrayLibrary, folded: int) -> None:
        self.inputs, self.outputs = body.inputs, body.outputs
        steps = _steps(body, xp)
        constants = dict(body.constants)
        # Steps that read small constants only are run here, and their results become constants.
        remaining_steps = []
        for step in steps:
            operand_names = step.node.reads()
            if operand_names <= constants.keys() and sum(constants[name].size for name in operand_names) <= folded:
                values = {name: _value(constants[name], xp) for name in operand_names}
                step.run(values, Lookups(xp, clamped=False))
                folded_arrays = {name: _to_numpy(values[name], xp) for name in step.node.outputs if name in values}
                if sum(array.size for array in folded_arrays.values()) <= folded:
                    constants.update(folded_arrays)
                    continue
            remaining_steps.append(step)
        self._steps = remaining_steps
        read_names = set(self.outputs).union(*(step.node.reads() for step in self._steps))
        self.constants = {name: array for name, array in constants.items() if name in read_names}
        self._known = {name: known_constant(array) for name, array in self.constants.items()}

    def run(self, arrays: Mapping[str, Array], lookups: Lookups) -> list[Array]:
        """The outputs in order. arrays: the inputs, and those constants that are arrays of the library already.

        Raises ModelError, naming the node, for what the library refuses.
        """
        values: Values = dict(arrays)
        for name, constant in self._known.items():
            if constant is not None:
                values[name] = Known(constant.numbers, constant.dtype, arrays.get(name))
            elif name not in arrays:
                values[name] = lookups.xp.asarray(self.constants[name])
        _run(self._steps, values, lookups, set(self.outputs))
        return [_array(values[name], lookups.xp) for name in self.outputs]


class Step:
    """A node bound to its operator. last_use: names that no later step reads. Raises ModelError for an attribute or a
    number of inputs that the operator does not have."""

    def __init__(self, node: Node, row: Operator, opset: int) -> None:
        self.node, self._row, self._opset = node, row, opset
        self._on_numbers = ON_NUMBERS.get(node.op_type)
        extras = sorted(node.attributes.keys() - row.attributes.keys())
        if extras:
            raise ModelError(f"{node}: its attribute {extras[0]!r} is not known; leave it out")
        missing_names = [
            key for key, default in row.attributes.items() if default is _REQUIRED and key not in node.attributes
        ]
        if missing_names:
            raise ModelError(
                f"{node}: it has no attribute {missing_names[0]!r}, which ONNX requires; export the model again"
            )
        max_inputs = None if row.variadic else len(row.kinds)
        if not row.needed <= len(node.inputs) or (max_inputs is not None and len(node.inputs) > max_inputs):
            supported_text = f"at least {row.needed}" if max_inputs is None else f"{row.needed} to {max_inputs}"
            raise ModelError(f"{node}: it has {len(node.inputs)} inputs; {supported_text} are supported")
        defaults = {key: default for key, default in row.attributes.items() if default is not _REQUIRED}
        self._attributes = {**defaults, **node.attributes}
        self.last_use: tuple[str, ...] = ()

    def run(self, values: Values, lookups: Lookups) -> None:
        """Read the inputs from `values` and write the outputs there. Raises ModelError, naming the node."""
        try:
            result = self._result([values[name] if name else None for name in self.node.inputs], lookups)
        except ModelError as error:
            raise ModelError(f"{self.node}: {error}") from error
        except Exception as error:  # many classes, for sizes, types and values that an operator cannot take
            # The first line of a library's message; JAX's go on for pages.
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(f"{self.node}: {lookups.xp.name} cannot run it: {reason}") from error
        results = result if isinstance(result, tuple) else (result,)
        values.update(
            (name, value) for name, value in zip(self.node.outputs, results, strict=False) if name and value is not None
        )

    def _result(self, inputs: Sequence[Value | None], lookups: Lookups) -> Result:
        if self._on_numbers and all(isinstance(value, Known) for value in inputs if value is not None):
            folded_result = self._on_numbers(lookups.xp, *inputs, **self._attributes)
            if folded_result is not None and folded_result.numbers.size <= MOST_NUMBERS:
                return folded_result
        lookups.node = self.node.name or self.node.outputs[0]
        special_arguments = {"opset": self._opset, "outputs": len(self.node.outputs), "lookups": lookups}
        special_inputs = {name: special_arguments[name] for name in self._row.special}
        return self._row.run(lookups.xp, *self._row.arguments(inputs, lookups.xp), **self._attributes, **special_inputs)


class Branch:
    """An `If`. If its condition is known, only the selected branch is run."""

    def __init__(self, node: Node, xp: ArrayLibrary) -> None:
        self.node = node
        self._bodies: tuple[Body, ...] = (node.attributes["then_branch"], node.attributes["else_branch"])
        self._steps = tuple(_steps(body, xp) for body in self._bodies)
        self.last_use: tuple[str, ...] = ()

    def run(self, values: Values, lookups: Lookups) -> None:
        """See `Step.run`."""
        condition = values[self.node.inputs[0]]
        try:
            if isinstance(condition, Known):
                results: Iterable[Any] = self._run(not bool(condition.first), values, lookups)
            else:

                def arrays(which: int) -> tuple[Array, ...]:
                    return tuple(_array(value, lookups.xp) for value in self._run(which, values, lookups))

                results = lookups.xp.branch(condition.reshape(()), partial(arrays, 0), partial(arrays, 1))
        except ModelError as error:
            raise ModelError(f"{self.node}: {error}") from error
        values.update((name, value) for name, value in zip(self.node.outputs, results, strict=True) if name)

    def _run(self, which: int, values: Values, lookups: Lookups) -> list[Value]:
        body = self._bodies[which]
        body_values: Values = {**values, **{name: _value(array, lookups.xp) for name, array in body.constants.items()}}
        _run(self._steps[which], body_values, lookups, set(body.outputs) | values.keys())
        return [body_values[name] for name in body.outputs]


AnyStep = Step | Branch


def _steps(body: Body, xp: ArrayLibrary) -> list[AnyStep]:
    """A graph's nodes, each bound to its operator. Raises ModelError for an operator that is not in the table."""
    steps: list[AnyStep] = [_step(node, body.opset, xp) for node in body.nodes]
    later_names: set[str] = set()
    for step in reversed(steps):
        names = step.node.reads() | {name for name in step.node.outputs if name}
        step.last_use = tuple(names - later_names)
        later_names |= names
    return steps


def _run(steps: Sequence[AnyStep], values: Values, lookups: Lookups, keep: set[str]) -> None:
    """Run steps in order; a value is dropped when no later step reads it, unless it is in `keep`."""
    for step in steps:
        step.run(values, lookups)
        for name in step.last_use:
            if name not in keep:
                values.pop(name, None)


def _step(node: Node, opset: int, xp: ArrayLibrary) -> AnyStep:
    if node.op_type == "If" and not node.domain:
        return Branch(node, xp)
    row = None if node.domain or node.op_type in xp.lacks else OPERATORS.get(node.op_type)
    if row is None:
        raise ModelError(
            f"{node}: the conversion to {xp.name} does not know this operator; "
            "use the backend onnxruntime or tensorrt, or export the model without it"
        )
    return Step(node, row, opset)


def _array(value: Value, xp: ArrayLibrary) -> Array:
    return value.on(xp) if isinstance(value, Known) else value


def _value(constant: NumpyArray, xp: ArrayLibrary) -> Value:
    return known_constant(constant) or xp.asarray(constant)


def _to_numpy(value: Value, xp: ArrayLibrary) -> NumpyArray:
    if isinstance(value, Known):
        return np.array(value.numbers.tolist(), value.dtype).reshape(value.numbers.shape)
    return xp.to_numpy(value)
