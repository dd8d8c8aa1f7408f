"""The table of operators, and the values that flow between them.

An operator is a function whose signature is its declaration::

    @operator("Softmax")
    def softmax(x: Tensor, *, axis: int = -1) -> Tensor: ...

Positional parameters are ONNX inputs, `X | None = None` an optional one, `*xs` any number. What an input arrives as is
its annotation: `Tensor`; `Numbers`, a flat list of Python numbers (sizes, axes, pads), symbolic ones while torch.export
traces; or `Value`, whichever there is. Keyword-only parameters are ONNX attributes, and `opset`, `device`, `outputs`
(how many results are asked for) and `lookups`. An attribute that a node has and the signature has not is refused.

Sizes stay numbers for as long as possible (`Known`): `Reshape(x, Concat(Gather(Shape(x), 0), [-1]))` through tensors
would freeze the sizes of the example that is traced.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginery.core.errors import ModelError

Numbers = list[Any]
ObjectArray = np.ndarray[Any, np.dtype[np.object_]]
SPECIAL = ("opset", "device", "outputs", "lookups")
# Numbers of a tensor that are looked at one by one; a longer one is data.
MOST_NUMBERS = 1024


@dataclass(frozen=True)
class Known:
    """Numbers that are known while the graph is traced: `int`, `float`, `bool` or torch's symbolic ones.

    numbers: an object array of the tensor's shape.  dtype: of the tensor it stands for.
    tensor: the same on a device, where there is one.
    """

    numbers: ObjectArray
    dtype: torch.dtype
    tensor: Tensor | None = field(default=None, compare=False)

    @property
    def each(self) -> Numbers:
        """The numbers in a flat list."""
        return list(self.numbers.flat)

    @property
    def first(self) -> Any:
        """The first number: the only one, where the tensor stands for one."""
        return self.numbers.flat[0]

    @property
    def symbolic(self) -> bool:
        """Whether any number depends on a dynamic size."""
        return any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in self.each)

    def on(self, device: torch.device) -> Tensor:
        """The tensor. A single number becomes a literal, which compilers put into their code."""
        if self.numbers.size == 1:
            return torch.full(self.numbers.shape, self.first, dtype=self.dtype, device=device)
        if self.tensor is not None:
            return self.tensor
        if not self.symbolic:
            return torch.tensor(self.numbers.tolist(), dtype=self.dtype, device=device).reshape(self.numbers.shape)
        each = [torch.full((), number, dtype=self.dtype, device=device) for number in self.each]
        return torch.stack(each).reshape(self.numbers.shape)


class Lookups:
    """Indices and integer divisors that come from data, of one run, and whether each can be used as it is.

    Torch raises for an index outside of what it looks into, and for a divisor of zero. Code that a compiler makes of
    it ends the process, or reads what lies there: with `clamped`, indices are brought inside and divisors of zero
    become 1, and what they were is kept for whoever runs the code.

    faults: what is wrong where, in words, if the truth of the same place in `inside` does not hold.
    """

    def __init__(self, clamped: bool) -> None:
        self.clamped = clamped
        self.faults: list[str] = []
        self.inside: list[Tensor] = []
        self.node = ""

    def into(self, indices: Tensor, size: Any) -> Tensor:
        """Indices into an axis of that size, those from its end (negative ones) counted from its start."""
        indices = indices.to(torch.int64)
        self._expect("an index is out of range", (indices >= -size) & (indices < size))
        found = torch.where(indices < 0, indices + size, indices)
        return found.clamp(0, size - 1) if self.clamped else found

    def divisor(self, numbers: Tensor) -> Tensor:
        """Integers to divide by."""
        self._expect("an integer is divided by zero", numbers != 0)
        return torch.where(numbers == 0, torch.ones_like(numbers), numbers) if self.clamped else numbers

    def _expect(self, fault: str, fine: Tensor) -> None:
        if self.clamped:
            self.faults.append(f"{fault} at node {self.node!r}")
            self.inside.append(fine.all())


Value = Tensor | Known
Result = Value | tuple[Value | None, ...]


def known(numbers: typing.Iterable[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Known:
    """A `Known` of these numbers, laid out in that shape."""
    array = np.empty(shape, dtype=object)
    for index, number in zip(np.ndindex(shape), numbers, strict=True):
        array[index] = number
    return Known(array, dtype)


def known_tensor(tensor: Tensor) -> Value:
    """A constant tensor with its numbers, where it is small; a large one as it is."""
    if tensor.numel() > MOST_NUMBERS or tensor.dtype.itemsize < 1 or tensor.dtype in _NO_NUMBERS:
        return tensor
    made = known(tensor.reshape(-1).tolist(), tuple(tensor.shape), tensor.dtype)
    return Known(made.numbers, made.dtype, tensor)


_NO_NUMBERS = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}


def numbers_of(value: Value) -> Numbers:
    """A value's numbers in a flat list; read back from a tensor if need be, which makes them depend on data."""
    if isinstance(value, Known):
        return value.each
    return list(value.reshape(-1).tolist())


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    kinds: what each positional input arrives as.  optional: how many of them may be left out, from the end or by an
    empty name.  attributes: their defaults, `inspect.Parameter.empty` where ONNX has none.
    """

    name: str
    run: Callable[..., Result]
    kinds: tuple[type | Any, ...]
    needed: int
    variadic: bool
    attributes: Mapping[str, Any]
    special: frozenset[str]

    def arguments(self, values: typing.Sequence[Value | None], device: torch.device) -> list[Any]:
        """The inputs as this operator takes them."""
        kinds = self.kinds if not self.variadic else self.kinds[:-1] + self.kinds[-1:] * len(values)
        return [_as(kind, value, device) for kind, value in zip(kinds, values, strict=False)]


def least(a: Any, b: Any) -> Any:
    """The smaller of two numbers, which may be symbolic."""
    return torch.sym_min(a, b)  # type: ignore[no-untyped-call]


def greatest(a: Any, b: Any) -> Any:
    """The larger of two numbers, which may be symbolic."""
    return torch.sym_max(a, b)  # type: ignore[no-untyped-call]


OPERATORS: dict[str, Operator] = {}
ON_NUMBERS: dict[str, Callable[..., Known | None]] = {}


Function = typing.TypeVar("Function", bound=Callable[..., Any])


def operator(*names: str) -> Callable[[Function], Function]:
    """Register a function under these ONNX names. See the module's docstring for what its signature says."""

    def register(run: Function) -> Function:
        for name in names:
            OPERATORS[name] = _declared(name, run)
        return run

    return register


def on_numbers(*names: str) -> Callable[[Function], Function]:
    """Register what an operator does when all its inputs are `Known`: a function of these and of the attributes by
    name, that gives None where it has to be done on tensors after all."""

    def register(run: Function) -> Function:
        ON_NUMBERS.update(dict.fromkeys(names, run))
        return run

    return register


def must(condition: bool, words: str) -> None:
    """Raise ModelError for what an operator here does not do; the node is named by whoever calls the operator."""
    if not condition:
        raise ModelError(words)


def _declared(name: str, run: Callable[..., Result]) -> Operator:
    hints = typing.get_type_hints(run)
    parameters = inspect.signature(run).parameters.values()
    inputs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in inputs)
    return Operator(
        name,
        run,
        tuple(_kind(hints[p.name]) for p in inputs),
        sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in inputs),
        variadic,
        {p.name: p.default for p in keywords if p.name not in SPECIAL},
        frozenset(p.name for p in keywords if p.name in SPECIAL),
    )


def _kind(hint: Any) -> Any:
    """An annotation without its `| None`."""
    given = [part for part in typing.get_args(hint) if part is not type(None)]
    if hint == Numbers or hint is Tensor:
        return hint
    return given[0] if len(given) == 1 else Value


def _as(kind: Any, value: Value | None, device: torch.device) -> Any:
    if value is None or kind is Value:
        return value
    if kind == Numbers:
        return numbers_of(value)
    return value.on(device) if isinstance(value, Known) else value
