"""The table of ONNX operators as array programs, and the array library that they are written in."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from enginesmith.core.errors import ModelError

# A size, or what was computed from sizes: a Python number, or one of the library's symbolic ones.
Number = int | float
DType = object
NumpyArray = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


class Array(Protocol):
    """An array of either library: the attributes and methods that the operators use."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, symbolic ones where they are dynamic."""

    @property
    def ndim(self) -> int:
        """The number of axes."""

    @property
    def dtype(self) -> DType:
        """The library's dtype."""

    @property
    def T(self) -> "Array":  # noqa: N802 - both libraries' name
        """The matrix [n, m] as [m, n]."""

    def reshape(self, shape: Sequence[int]) -> "Array":
        """The same elements in another shape, of which one size may be -1."""

    def __getitem__(self, index: object) -> "Array": ...
    def __add__(self, other: object) -> "Array": ...
    def __radd__(self, other: object) -> "Array": ...
    def __sub__(self, other: object) -> "Array": ...
    def __rsub__(self, other: object) -> "Array": ...
    def __mul__(self, other: object) -> "Array": ...
    def __rmul__(self, other: object) -> "Array": ...
    def __truediv__(self, other: object) -> "Array": ...
    def __rtruediv__(self, other: object) -> "Array": ...
    def __pow__(self, other: object) -> "Array": ...
    def __neg__(self) -> "Array": ...
    def __and__(self, other: object) -> "Array": ...
    def __or__(self, other: object) -> "Array": ...
    def __lt__(self, other: object) -> "Array": ...
    def __le__(self, other: object) -> "Array": ...
    def __gt__(self, other: object) -> "Array": ...
    def __ge__(self, other: object) -> "Array": ...
    def __eq__(self, other: object) -> "Array": ...  # type: ignore[override]
    def __ne__(self, other: object) -> "Array": ...  # type: ignore[override]


class ArrayLibrary:
    """The functions of an array library by name: those of the adapter, else those of the library's own modules.

    The two libraries agree on most names and, positional, on most arguments (`xp.where`, `xp.softmax(x, axis)`). The
    adapter, `builders.onnx_torch.arrays` or `builders.backends.xla.jax_arrays`, has the functions on which they do not.
    Functions that give something else than an array are declared here.

    name: for messages.  lacks: operators of the table that the adapter has no functions for.
    """

    asarray: Callable[[NumpyArray], Array]
    to_numpy: Callable[[Array], NumpyArray]
    dtype: Callable[..., DType]
    is_floating: Callable[[Array], bool]
    sym_max: Callable[[Number, Number], int]
    sym_min: Callable[[Number, Number], int]
    same: Callable[[Number, Number], bool]
    numbers: Callable[[Array], list[Number]]
    ends: Callable[[DType], tuple[int, int]]
    top_k: Callable[..., tuple[Array, Array]]
    branch: Callable[..., Sequence[object]]
    scan: Callable[..., tuple[tuple[Array, ...], Array]]
    at_once: Callable[[], AbstractContextManager[object]]

    def __init__(self, name: str, adapter: ModuleType, *modules: ModuleType, lacks: Iterable[str] = ()) -> None:
        self.name, self.lacks = name, frozenset(lacks)
        self._modules = (adapter, *modules)

    def __getattr__(self, name: str) -> Callable[..., Array]:
        for module in self._modules:
            if hasattr(module, name):
                setattr(self, name, function := getattr(module, name))
                return function  # type: ignore[no-any-return]
        raise AttributeError(f"the conversion to {self.name} has no {name}")


# The table of operators, and the values that operators read and return.
#
# An operator is a function whose signature is its declaration::
#
#     @operator("Softmax")
#     def softmax(xp: ArrayLibrary, x: Array, *, axis: int = -1) -> Array: ...
#
# `xp` is the array library. The other positional parameters are ONNX inputs, `X | None = None` an optional one, `*xs`
# any number. The annotation of an input is what it is converted to: `Array`; `Numbers`, a flat list of Python numbers
# (sizes, axes, pads), symbolic ones while a library traces; or `Value`, either as it comes. Keyword-only parameters are
# ONNX attributes, and `opset`, `outputs` (how many results are asked for) and `lookups`. An attribute that is not in
# the signature is refused.
#
# Sizes stay numbers for as long as possible (`Known`): `Reshape(x, Concat(Gather(Shape(x), 0), [-1]))` through arrays
# would freeze the sizes of the example that is traced.

Numbers = list[Any]
ObjectArray = np.ndarray[Any, np.dtype[np.object_]]
SPECIAL = ("opset", "outputs", "lookups")
# Maximum size of arrays that are `Known`; longer ones are data.
MOST_NUMBERS = 1024
Function = typing.TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Known:
    """Numbers that are known while the graph is traced: `int`, `float`, `bool` or a library's symbolic ones.

    numbers: an object array in the shape of the ONNX value.  dtype: numpy's, of the ONNX value.
    array: the same value as an array of the library, if there is one.
    """

    numbers: ObjectArray
    dtype: np.dtype[Any]
    array: Array | None = field(default=None, compare=False)

    @property
    def each(self) -> Numbers:
        """The numbers in a flat list."""
        return list(self.numbers.flat)

    @property
    def first(self) -> Any:
        """The first number: the only one, where the array stands for one."""
        return self.numbers.flat[0]

    @property
    def symbolic(self) -> bool:
        """Whether any number depends on a dynamic size."""
        return any(not isinstance(number, int | float) for number in self.each)

    def on(self, xp: ArrayLibrary) -> Array:
        """The array. A single number becomes a literal, which compilers embed in their code."""
        if self.numbers.size == 1:
            return xp.full(self.numbers.shape, self.first, dtype=xp.dtype(self.dtype, narrow=True))
        if self.array is not None:
            return self.array
        if not self.symbolic:
            return xp.asarray(np.array(self.numbers.tolist(), self.dtype).reshape(self.numbers.shape))
        numbers = [xp.full((), number, dtype=xp.dtype(self.dtype, narrow=True)) for number in self.each]
        return xp.stack(numbers).reshape(self.numbers.shape)


class Lookups:
    """Indices and integer divisors of one run that are computed from data, checked for compiled code.

    An eager library raises for an index out of range and for a divisor of zero. Compiled code ends the process, or
    reads other memory. With `clamped`, indices are brought into range and divisors of zero become 1; `inside` tells the
    caller of that code whether this was necessary.

    inside: arrays of one bool, true if no number had to be changed.  faults: for each array in `inside`, the fault in
    words if it is false.
    """

    def __init__(self, xp: ArrayLibrary, clamped: bool) -> None:
        self.xp, self.clamped = xp, clamped
        self.faults: list[str] = []
        self.inside: list[Array] = []
        self.node = ""

    def into(self, indices: Array, size: Any) -> Array:
        """Indices into an axis of that size, with negative ones, which count from its end, made positive."""
        indices = self.xp.astype(indices, self.xp.int64)
        self._expect("an index is out of range", (indices >= -size) & (indices < size))
        positions = self.xp.where(indices < 0, indices + size, indices)
        return self.xp.clip(positions, 0, size - 1) if self.clamped else positions

    def divisor(self, numbers: Array) -> Array:
        """Integers to divide by; with `clamped`, 1 instead of 0."""
        self._expect("an integer is divided by zero", numbers != 0)
        return self.xp.where(numbers == 0, self.xp.ones_like(numbers), numbers) if self.clamped else numbers

    def _expect(self, fault: str, fine: Array) -> None:
        if self.clamped:
            self.faults.append(f"{fault} at node {self.node!r}")
            self.inside.append(self.xp.all(fine))


Value = Array | Known
Result = Value | tuple[Value | None, ...]


def make_known(numbers: typing.Iterable[Any], shape: tuple[int, ...], dtype: Any) -> Known:
    """A `Known` with these numbers, in row-major order."""
    array = np.empty(shape, dtype=object)
    for index, number in zip(np.ndindex(shape), numbers, strict=True):
        array[index] = number
    return Known(array, np.dtype(dtype))


def known_constant(constant: NumpyArray) -> Known | None:
    """A `Known` of a constant; None for one of more than `MOST_NUMBERS`, and of FP8, FP4, strings and the like."""
    kind = "f" if constant.dtype.name == "bfloat16" else "i" if "int4" in constant.dtype.name else constant.dtype.kind
    if constant.size > MOST_NUMBERS or kind not in "biuf":
        return None
    wide_array = constant.astype({"f": np.float64, "i": np.int64}.get(kind, constant.dtype))
    return Known(wide_array.astype(object), constant.dtype)


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    kinds: what each input is converted to.  needed: how many inputs are required.  attributes: name -> default,
    `inspect.Parameter.empty` where ONNX has none.  special: those of `SPECIAL` that the function takes.
    variadic: whether the last input may be repeated.
    """

    name: str
    run: Callable[..., Result]
    kinds: tuple[Any, ...]
    needed: int
    variadic: bool
    attributes: Mapping[str, Any]
    special: frozenset[str]

    def arguments(self, values: typing.Sequence[Value | None], xp: ArrayLibrary) -> list[Any]:
        """The inputs, converted to the kinds of this operator."""
        kinds = self.kinds if not self.variadic else self.kinds[:-1] + self.kinds[-1:] * len(values)
        return [_as(kind, value, xp) for kind, value in zip(kinds, values, strict=False)]


OPERATORS: dict[str, Operator] = {}
ON_NUMBERS: dict[str, Callable[..., Known | None]] = {}


def operator(*names: str) -> Callable[[Function], Function]:
    """Register a function under these ONNX names. The comment at `Known` describes its signature."""

    def register(run: Function) -> Function:
        for name in names:
            hints = typing.get_type_hints(run)
            parameters = [p for p in inspect.signature(run).parameters.values() if p.name != "xp"]
            inputs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
            keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
            OPERATORS[name] = Operator(
                name,
                run,
                tuple(_kind(hints[p.name]) for p in inputs),
                sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in inputs),
                any(p.kind is p.VAR_POSITIONAL for p in inputs),
                {p.name: p.default for p in keywords if p.name not in SPECIAL},
                frozenset(p.name for p in keywords if p.name in SPECIAL),
            )
        return run

    return register


def on_numbers(*names: str) -> Callable[[Function], Function]:
    """Register the function of an operator for inputs that are all `Known`. Its arguments are the library, the inputs
    and the attributes by name; it returns None if the operator must run on arrays."""

    def register(run: Function) -> Function:
        ON_NUMBERS.update(dict.fromkeys(names, run))
        return run

    return register


def must(condition: bool, words: str) -> None:
    """Raise ModelError with these words unless the condition holds; `graph.Step` adds the node to the message."""
    if not condition:
        raise ModelError(words)


def _kind(hint: Any) -> Any:
    """`Array`, `Numbers` or `Value`: an annotation without its `| None`."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if hint in (Numbers, Array):
        return hint
    return members[0] if len(members) == 1 else Value


def _as(kind: Any, value: Value | None, xp: ArrayLibrary) -> Any:
    if value is None or kind is Value:
        return value
    if kind == Numbers:
        return value.each if isinstance(value, Known) else xp.numbers(value)
    return value.on(xp) if isinstance(value, Known) else value
