"""The inputs that repeated calls take turns with: a few sizes of the golden set, each with two sets of values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from enginery.arrays.npz import Array
from enginery.core.types import Dim, Precision, Session, Tensors, TensorSpec
from validation.data.samples import sizes_of
from validation.fuzz.cases import FuzzCase
from validation.fuzz.values import make
from validation.golden.golden_set import edge_sizes

# Edges beside the size of the golden cases, smallest first: small ones leave time for many calls.
MOST_EDGES = 3
# Draws among which two that differ are looked for.
MOST_DRAWS = 4
SEED = 0


@dataclass(frozen=True)
class Bits:
    """A copy of an array: what it held, bit for bit."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Array) -> "Bits":
        """What an array holds now."""
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> Array:
        """A new array that holds it."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()


@dataclass
class Repeated:
    """One set of inputs: the arrays that are handed in, copies of them, and what was answered first.

    elements: of all inputs together.
    """

    name: str
    arrays: dict[str, Array]
    elements: int
    copies: dict[str, Bits] = field(default_factory=dict)
    first: dict[str, Bits] | None = None

    def __post_init__(self) -> None:
        self.copies = {name: Bits.of(array) for name, array in self.arrays.items()}


def pool_of(
    session: Session, specs: Sequence[TensorSpec], dims: Sequence[Dim], groups: Sequence[Tensors], precision: Precision
) -> list[Repeated]:
    """Inputs of at most 1 + MOST_EDGES sizes, smallest last, as the session takes them. groups: real inputs."""
    edges = sorted(edge_sizes(specs, dims), key=lambda sizes: _elements(specs, sizes))
    own = sizes_of(groups[0], specs)
    chosen = [own, *islice((sizes for sizes in edges if sizes != own), MOST_EDGES)]
    halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    return [item for sizes in chosen for item in _two(sizes, halves, (specs, groups, precision))]


def _elements(specs: Sequence[TensorSpec], sizes: dict[str, int]) -> int:
    return sum(math.prod(spec.at(sizes)) for spec in specs)


def _two(
    sizes: dict[str, int], halves: set[str], of: tuple[Sequence[TensorSpec], Sequence[Tensors], Precision]
) -> Iterator[Repeated]:
    """Two sets of inputs of one size that differ: a buffer that holds the same again does not show that it is shared.

    Where none differ among MOST_DRAWS, the second has half of each number; of integers alone there is one set then.
    """
    specs, groups, precision = of
    drawn = (FuzzCase(tuple(sizes.items()), draw=nth) for nth in range(MOST_DRAWS))
    made = [(str(case), make(case, specs, groups, SEED, precision)) for case in drawn]
    name, first = made[0]
    made.append(
        (f"{name} halved", {key: array / 2 if array.dtype.kind == "f" else array for key, array in first.items()})
    )
    taken: list[Repeated] = []
    for name, inputs in made:
        kinds = {key: np.dtype(np.float16) if key in halves else array.dtype for key, array in inputs.items()}
        arrays = {key: np.array(array, kinds[key], order="C") for key, array in inputs.items()}
        found = Repeated(name, arrays, _elements(specs, sizes))
        if not taken or found.copies != taken[0].copies:
            taken.append(found)
    yield from taken[:2]
