"""Groups of a golden set's inputs for cases to draw from, read when they are asked for."""

from collections.abc import Sequence
from itertools import islice
from typing import overload

from enginery.core.types import Tensors
from validation.golden.golden_set import GoldenSet, case_kinds

# More of them stay on disk. Part of what a case is: another number draws other groups.
MOST_GROUPS = 32
# Groups of no more bytes are kept once they were read.
MOST_KEPT = 1 << 20


class Groups(Sequence[Tensors]):
    """The inputs of the first golden cases."""

    def __init__(self, golden: GoldenSet) -> None:
        kinds = enumerate(case_kinds(golden))
        self._cases = golden.cases
        self._at = list(islice((index for index, kind in kinds if kind == "golden"), MOST_GROUPS))
        self._kept: dict[int, Tensors] = {}

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Tensors: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensors]: ...
    def __getitem__(self, index: int | slice) -> Tensors | list[Tensors]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = self._at[index]
        if at in self._kept:
            return self._kept[at]
        tensors = self._cases[at].inputs
        if sum(array.nbytes for array in tensors.values()) <= MOST_KEPT:
            self._kept[at] = tensors
        return tensors
