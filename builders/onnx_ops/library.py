"""An array library, PyTorch or JAX, under the names that the operators use."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import numpy as np

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
                setattr(self, name, found := getattr(module, name))
                return found  # type: ignore[no-any-return]
        raise AttributeError(f"the conversion to {self.name} has no {name}")
