"""A `torch.nn.Module` that does what an ONNX graph says, node by node."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from builders.onnx_torch.reading import Body, Graph, Node, safe_names
from builders.onnx_torch.table import (
    MOST_NUMBERS,
    ON_NUMBERS,
    OPERATORS,
    Known,
    Lookups,
    Operator,
    Result,
    Value,
    known_tensor,
)
from enginery.core.errors import ModelError

# What torch raises for sizes, types and values that an operator cannot take.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError)
Values = dict[str, Value]


class OnnxModule(torch.nn.Module):
    """The graph as a module: `forward` takes its inputs' tensors in their order and gives a tuple of its outputs'.

    With `clamped` there is one more output, bool [n]: false for each of the `faults` that there was. The others mean
    something only where all are true (see `table.Lookups`).

    Floating-point constants are parameters (without gradients), others buffers. Raises ModelError on construction for
    an operator or attribute that is not in the table, and while running for what torch refuses; each names the node.
    """

    def __init__(self, graph: Graph, clamped: bool = False) -> None:
        super().__init__()
        self._clamped = clamped
        self._told = _Told()
        self._input_names, self._output_names = graph.body.inputs, graph.body.outputs
        self._attribute_of: dict[str, str] = {}
        self._small: dict[str, Value] = {}
        self._steps = steps_of(graph.body, graph.opset)
        constants = dict(graph.body.constants)
        self._fold(constants)
        used = set(self._output_names).union(*(step.node.reads() for step in self._steps))
        for name, plain in safe_names([name for name in constants if name in used]):
            self._keep(name, plain, constants[name])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph on tensors in the order of its inputs. Raises ModelError for another number of them."""
        if len(inputs) != len(self._input_names):
            raise ModelError(f"the model takes {len(self._input_names)} inputs, not {len(inputs)}")
        device = inputs[0].device if inputs else self._device()
        values: Values = {name: self._constant(name) for name in self._attribute_of}
        values.update(zip(self._input_names, inputs, strict=True))
        lookups = Lookups(self._clamped)
        run_steps(self._steps, values, Run(device, lookups), set(self._output_names))
        made = tuple(_tensor(values[name], device) for name in self._output_names)
        self._told.faults = tuple(lookups.faults)
        return (*made, torch.stack(lookups.inside)) if lookups.inside else made

    @property
    def faults(self) -> tuple[str, ...]:
        """What the last output told of when `forward` last ran, in words; see `clamped`."""
        return self._told.faults

    def _constant(self, name: str) -> Value:
        tensor = getattr(self, self._attribute_of[name])
        small = self._small.get(name)
        return Known(small.numbers, small.dtype, tensor) if isinstance(small, Known) else tensor

    def _keep(self, name: str, plain: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self.register_parameter(plain, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(plain, tensor)
        self._attribute_of[name] = plain
        small = known_tensor(tensor)
        if isinstance(small, Known):
            self._small[name] = Known(small.numbers, small.dtype)

    def _fold(self, constants: dict[str, Tensor]) -> None:
        """Run the nodes that only small constants go into, once: sizes and scales computed by nodes become numbers."""
        host = torch.device("cpu")
        left = []
        for step in self._steps:
            read = step.node.reads()
            if read <= constants.keys() and sum(constants[name].numel() for name in read) <= MOST_NUMBERS:
                values: Values = {name: known_tensor(constants[name]) for name in read}
                step.run(values, Run(host, Lookups(clamped=False)))
                made = {name: _tensor(values[name], host) for name in step.node.outputs if name}
                if sum(tensor.numel() for tensor in made.values()) <= MOST_NUMBERS:
                    constants.update(made)
                    continue
            left.append(step)
        self._steps = left

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))


class _Told:
    """What a run leaves behind; in an object of its own, since torch.export puts a module's attributes back."""

    faults: tuple[str, ...] = ()


class Run(NamedTuple):
    """What one run of a graph has for all its nodes."""

    device: torch.device
    lookups: Lookups


class Step:
    """A node with its operator, checked and bound."""

    def __init__(self, node: Node, row: Operator, opset: int) -> None:
        self.node, self._row, self._opset = node, row, opset
        self._on_numbers = ON_NUMBERS.get(node.op_type)
        self._attributes = _checked(node, row)
        self.last_use: tuple[str, ...] = ()

    def run(self, values: Values, run: Run) -> None:
        """Take the inputs from `values` and put the outputs there. Raises ModelError, naming the node."""
        inputs = [values[name] if name else None for name in self.node.inputs]
        try:
            result = self._result(inputs, run)
        except ModelError as error:
            raise ModelError(f"{self.node}: {error}") from error
        except _FAILURES as error:
            raise ModelError(f"{self.node}: torch cannot run it: {error}") from error
        results = result if isinstance(result, tuple) else (result,)
        for name, value in zip(self.node.outputs, results, strict=False):
            if name and value is not None:
                values[name] = value

    def _result(self, inputs: Sequence[Value | None], run: Run) -> Result:
        if self._on_numbers and all(isinstance(value, Known) for value in inputs if value is not None):
            made = self._on_numbers(*inputs, **self._attributes)
            if made is not None and made.numbers.size <= MOST_NUMBERS:
                return made
        run.lookups.node = self.node.name or self.node.outputs[0]
        given = {"opset": self._opset, "device": run.device, "outputs": len(self.node.outputs), "lookups": run.lookups}
        special = {name: given[name] for name in self._row.special}
        arguments = self._row.arguments(inputs, run.device)
        return self._row.run(*arguments, **self._attributes, **special)


class Branch:
    """An `If`. Only the branch that is taken is run; in a program it has to be known which."""

    def __init__(self, node: Node, opset: int) -> None:
        self.node = node
        bodies: Mapping[str, Body] = node.attributes
        self._bodies = (bodies["then_branch"], bodies["else_branch"])
        self._steps = tuple(steps_of(body, opset) for body in self._bodies)
        self._constants = tuple({name: known_tensor(t) for name, t in body.constants.items()} for body in self._bodies)
        self.last_use: tuple[str, ...] = ()

    def run(self, values: Values, run: Run) -> None:
        """See `Step.run`."""
        results: Sequence[Value]
        condition = values[self.node.inputs[0]]
        if isinstance(condition, Known):
            results = self._run(not bool(condition.first), values, run)
        elif torch.compiler.is_exporting():
            raise ModelError(
                f"{self.node}: data chooses its branch, which the program of another compiler cannot hold; "
                "use the backend onnxruntime, or export the model without it"
            )
        else:
            results = self._run(not bool(condition.reshape(())), values, run)
        values.update((name, value) for name, value in zip(self.node.outputs, results, strict=True) if name)

    def _run(self, which: int, values: Mapping[str, Value], run: Run) -> list[Value]:
        body = self._bodies[which]
        inner: Values = {**values, **self._constants[which]}
        run_steps(self._steps[which], inner, run, set(body.outputs) | values.keys())
        return [inner[name] for name in body.outputs]


AnyStep = Step | Branch


def steps_of(body: Body, opset: int) -> list[AnyStep]:
    """A graph's nodes, each bound to its operator. Raises ModelError for one that is not in the table."""
    steps: list[AnyStep] = [_step(node, opset) for node in body.nodes]
    seen: set[str] = set()
    for step in reversed(steps):
        names = step.node.reads() | {name for name in step.node.outputs if name}
        step.last_use = tuple(names - seen)
        seen |= names
    return steps


def run_steps(steps: Sequence[AnyStep], values: Values, run: Run, keep: set[str]) -> None:
    """Run steps in order; a value goes when nothing after it reads it, unless it is in `keep`."""
    for step in steps:
        step.run(values, run)
        for name in step.last_use:
            if name not in keep:
                values.pop(name, None)


def _step(node: Node, opset: int) -> AnyStep:
    if node.op_type == "If" and not node.domain:
        return Branch(node, opset)
    row = None if node.domain else OPERATORS.get(node.op_type)
    if row is None:
        raise ModelError(
            f"{node}: the conversion to torch does not know this operator; "
            "use the backend onnxruntime or tensorrt, or export the model without it"
        )
    return Step(node, row, opset)


def _checked(node: Node, row: Operator) -> dict[str, Any]:
    unknown = sorted(node.attributes.keys() - row.attributes.keys())
    if unknown:
        raise ModelError(f"{node}: the conversion to torch does not know its attribute {unknown[0]!r}; leave it out")
    absent = [key for key, default in row.attributes.items() if default is _REQUIRED and key not in node.attributes]
    if absent:
        raise ModelError(f"{node}: it has no attribute {absent[0]!r}, which ONNX asks for; export the model again")
    most = None if row.variadic else len(row.kinds)
    if not row.needed <= len(node.inputs) or (most is not None and len(node.inputs) > most):
        raise ModelError(
            f"{node}: it has {len(node.inputs)} inputs, of which the conversion knows {most or row.needed}"
        )
    defaults = {key: default for key, default in row.attributes.items() if default is not _REQUIRED}
    return {**defaults, **node.attributes}


_REQUIRED = inspect.Parameter.empty


def _tensor(value: Value, device: torch.device) -> Tensor:
    return value.on(device) if isinstance(value, Known) else value
