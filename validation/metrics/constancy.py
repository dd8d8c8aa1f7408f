"""Whether an output is the same for every sample: an answer that does not depend on its inputs is no answer."""

from dataclasses import dataclass

import numpy as np

from enginery.arrays.npz import Array

# Samples that are compared together.
_ROWS = 1 << 10


@dataclass
class Constancy:
    """Looks at the samples of one output as they come. samples: how many.  constant: whether all are equal so far."""

    samples: int = 0
    constant: bool = True
    _first: Array | None = None

    def add(self, output: Array, samples: int) -> None:
        """Take an output of a case. samples: entries along axis 0 that are samples, or 1 where the whole is one."""
        self.samples += samples
        if not self.constant or not output.size:
            return
        rows = output if output.ndim and samples == output.shape[0] else output[None]
        if self._first is None:
            self._first = np.array(rows[0])
        first = self._first
        parts = (rows[1:2], *(rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)))
        if not all(_equal(part, first) for part in parts):
            self.constant, self._first = False, None


def _equal(rows: Array, first: Array) -> bool:
    """Whether all rows are `first`; where sizes differ, whether all elements are one number."""
    if rows.shape[1:] == first.shape:
        return bool((rows == first).all())
    return bool((rows == first.flat[0]).all() and (first == first.flat[0]).all())
