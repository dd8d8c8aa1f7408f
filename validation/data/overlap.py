"""Whether golden samples are calibration samples too: errors on samples that scales were chosen with are too small."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import OVERLAP, Check
from enginesmith.core.types import Tensors
from validation.data.samples import Samples, SampleSource

# The greatest share of golden samples that may be calibration samples too. A few are where data repeats itself; beyond
# a half, the measured errors are mostly those on samples that the scales were chosen with.
LARGEST = 0.5

# Of a model with state: steps that make one sample.
WINDOW = 8

_DIGEST_BYTES = 16


class DigestCollector:
    """A source of samples that collects the digest of every run that passes, and of each of its rows."""

    def __init__(self, source: SampleSource) -> None:
        self._source, self.name = source, source.name
        self._whole = isinstance(source, Samples) and source.complete
        self._seen: set[bytes] = set()

    @property
    def digest(self) -> str:
        """See `SampleSource`."""
        return self._source.digest

    @property
    def seen(self) -> bytes:
        """The digests of the samples that passed, each once, sorted and joined."""
        return b"".join(sorted(self._seen))

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """See `SampleSource`."""
        for end, inputs in self._source.runs(start, stop):
            self._seen |= {_digest(inputs), *_digests([inputs], self._whole)}
            yield end, inputs


def golden_digests(groups: Iterable[Tensors], complete: bool) -> bytes:
    """The digests of the golden samples, in order and joined. complete: a group is one sample; else its rows are."""
    return b"".join(_digests(groups, complete))


def window_digests(sequences: Iterable[Iterable[Tensors]]) -> bytes:
    """The digests of the steps of sequences, in order and joined, each with up to `WINDOW` - 1 steps before it: a step
    alone, such as one token, is in many sequences."""
    found = list[bytes]()
    for sequence in sequences:
        window = deque[bytes](maxlen=WINDOW)
        for inputs in sequence:
            window.append(_digest(inputs))
            found.append(hashlib.sha256(b"".join(window)).digest()[:_DIGEST_BYTES])
    return b"".join(found)


def merge_digests(parts: Iterable[bytes]) -> bytes:
    """The `DigestCollector.seen` of all parts together."""
    return b"".join(sorted(set().union(*map(_split, parts))))


def overlap_check(golden: bytes, calibration: bytes) -> Check:
    """The check of the share of golden samples that are calibration samples too. Both are given as joined digests."""
    known, samples = set(_split(calibration)), _split(golden)
    count = sum(sample in known for sample in samples)
    share = count / max(len(samples), 1)
    text = (
        f"{'all' if share == 1 else count or 'none'} of the {len(samples)} golden samples are calibration samples too"
    )
    why = ", and scales fit those best: the errors say little about other samples; give golden.data other ones"
    passed = share <= LARGEST
    return Check("quantization", OVERLAP, "", "golden", share, LARGEST, passed, text if passed else text + why)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def _digests(groups: Iterable[Tensors], complete: bool) -> Iterator[bytes]:
    for inputs in groups:
        lengths = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
        rows = lengths.pop() if len(lengths) == 1 and not complete else 0
        if rows == 0:
            yield _digest(inputs)
        for row in range(rows):
            yield _digest({name: array[row : row + 1] for name, array in inputs.items()})


def _digest(inputs: Tensors) -> bytes:
    found = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.digest()[:_DIGEST_BYTES]
