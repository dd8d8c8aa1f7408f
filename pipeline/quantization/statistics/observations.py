"""Statistics of a model's tensors over calibration samples, as one file from which every method derives its ranges.

They merge exactly and in any order: extremes, counts, histograms, and sums of per-run extremes. The sums are whole
multiples of 2**-149 (the smallest float32), so additions do not round.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, IntegrityError, digest_of
from pipeline.quantization.statistics.histogram import LogHistogram

FORMAT = 1
# Every float32 is a whole multiple of 2**-149, its smallest subnormal number (IEEE 754).
SMALLEST_EXPONENT = 149

Span = tuple[int, int]


@dataclass(frozen=True)
class TensorStatistics:
    """One tensor over all samples.

    low, high: extremes; infinite for a mask, and (inf, -inf) without a value.  elements: number of counted values.
    runs: number of runs with finite extremes.  low_sum, high_sum: sums of these extremes, in units of 2**-149.
    histogram: of the values; None if none was recorded.
    """

    low: float = math.inf
    high: float = -math.inf
    elements: int = 0
    runs: int = 0
    low_sum: int = 0
    high_sum: int = 0
    histogram: LogHistogram | None = None

    def extend_with(self, low: float, high: float, elements: int) -> "TensorStatistics":
        """A copy that includes one more run; the histogram does not change."""
        is_finite = math.isfinite(low) and math.isfinite(high)
        sums = (in_units(low), in_units(high)) if is_finite else (0, 0)
        return replace(
            self.merge(TensorStatistics(low, high, elements, int(is_finite), *sums)), histogram=self.histogram
        )

    def merge(self, other: "TensorStatistics") -> "TensorStatistics":
        """The statistics of both sets of samples together. A histogram that one side lacks is dropped."""
        histogram = self.histogram.merge(other.histogram) if self.histogram and other.histogram else None
        return TensorStatistics(
            min(self.low, other.low),
            max(self.high, other.high),
            self.elements + other.elements,
            self.runs + other.runs,
            self.low_sum + other.low_sum,
            self.high_sum + other.high_sum,
            histogram,
        )

    @property
    def finite(self) -> bool:
        """Whether the tensor has a range: it held values, all of them finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def averages(self) -> tuple[float, float]:
        """Means over all runs of the lowest and of the highest value; (0, 0) without a run."""
        if not self.runs:
            return 0.0, 0.0
        units = self.runs << SMALLEST_EXPONENT
        return float(Fraction(self.low_sum, units)), float(Fraction(self.high_sum, units))


@dataclass(frozen=True)
class Observations:
    """Statistics of a model's tensors. model, dataset: digests.

    spans: the observed samples, as rising, disjoint [start, stop) of the data set.
    """

    model: str
    dataset: str
    spans: tuple[Span, ...]
    tensors: Mapping[str, TensorStatistics] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of observed samples."""
        return sum(stop - start for start, stop in self.spans)

    def merge(self, other: "Observations") -> "Observations":
        """Two parts of one data set as one. Raises DataError when model, data or tensors differ or samples repeat."""
        for name in ("model", "dataset"):
            if getattr(self, name) != getattr(other, name):
                raise DataError(f"these observations are of another {name}; observe the parts of one data set")
        if self.tensors.keys() != other.tensors.keys():
            names = sorted(self.tensors.keys() ^ other.tensors.keys())
            raise DataError(f"only one of these observations has tensor {names[0]!r}; measure the same tensors")
        tensors = {
            name: tensor_statistics.merge(other.tensors[name]) for name, tensor_statistics in self.tensors.items()
        }
        return Observations(self.model, self.dataset, join_spans((*self.spans, *other.spans)), tensors)

    def to_bytes(self) -> bytes:
        """The file's content: equal observations give equal bytes."""
        from safetensors.numpy import save

        names = sorted(self.tensors)
        tensors = tuple(_ObservedTensor.of(name, self.tensors[name]) for name in names)
        document = encode(_ObservationsDocument(FORMAT, self.model, self.dataset, self.spans, tensors))
        histograms = [self.tensors[name].histogram or LogHistogram.of(np.empty(0, np.float32)) for name in names]
        keys = np.concatenate([np.empty(0, np.uint16), *(histogram.keys for histogram in histograms)])
        counts = np.concatenate([np.empty(0, np.int64), *(histogram.counts for histogram in histograms)])
        return save({"keys": keys, "counts": counts}, {"observations": json.dumps(document, sort_keys=True)})

    @classmethod
    def from_bytes(cls, data: bytes, place: str = "observations") -> "Observations":
        """Read the result of `to_bytes`. Raises DataError for anything else. place: name of the data in messages."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            size = int.from_bytes(data[:8], "little")
            document = parsing.load_json(data[8 : 8 + size])["__metadata__"]["observations"]
            return _parse(decode(parsing.load_json(document), _ObservationsDocument), load(data))
        except (SafetensorError, IntegrityError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{place}: not an observations file ({error!r}); calibrate again") from error

    @property
    def digest(self) -> str:
        """Digest over the statistics alone, not over their model and samples."""
        return digest_of([encode(_ObservedTensor.of(name, self.tensors[name])) for name in sorted(self.tensors)])


def join_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans in order, neighbours joined. Raises DataError when two overlap."""
    joined_spans: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined_spans and start < joined_spans[-1][1]:
            raise DataError(f"sample {start} was observed twice; give the workers parts that do not overlap")
        if joined_spans and start == joined_spans[-1][1]:
            joined_spans[-1] = (joined_spans[-1][0], stop)
        else:
            joined_spans.append((start, stop))
    return tuple(joined_spans)


def in_units(value: float) -> int:
    """A float32 as a whole multiple of 2**-149; exact."""
    return int(math.ldexp(value, SMALLEST_EXPONENT))


@dataclass(frozen=True)
class _ObservedTensor:
    """`TensorStatistics` in JSON, which has no infinities and no integers of 300 bits: numbers are hexadecimal text."""

    name: str
    low: str
    high: str
    elements: int
    runs: int
    sums: tuple[str, str]
    bins: int | None
    histogram: str | None

    @classmethod
    def of(cls, name: str, statistics: TensorStatistics) -> "_ObservedTensor":
        histogram, sums = statistics.histogram, (hex(statistics.low_sum), hex(statistics.high_sum))
        bins, digest = (None, None) if histogram is None else (len(histogram.keys), histogram.digest)
        low, high = float(statistics.low).hex(), float(statistics.high).hex()
        return cls(name, low, high, statistics.elements, statistics.runs, sums, bins, digest)


@dataclass(frozen=True)
class _ObservationsDocument:
    format: int
    model: str
    dataset: str
    spans: tuple[Span, ...]
    tensors: tuple[_ObservedTensor, ...]


def _parse(document: _ObservationsDocument, arrays: Mapping[str, Array]) -> Observations:
    if document.format != FORMAT:
        raise ValueError(f"format {document.format!r} is not {FORMAT}")
    tensors, start, keys, counts = {}, 0, arrays["keys"], arrays["counts"]
    for entry in document.tensors:
        stop = start + (entry.bins or 0)
        histogram = None if entry.bins is None else LogHistogram(keys[start:stop], counts[start:stop])
        if histogram is not None and histogram.digest != entry.histogram:
            raise ValueError(f"the histogram of {entry.name!r} does not match its digest")
        low, high = float.fromhex(entry.low), float.fromhex(entry.high)
        low_sum, high_sum = (int(text, 16) for text in entry.sums)
        tensors[entry.name] = TensorStatistics(low, high, entry.elements, entry.runs, low_sum, high_sum, histogram)
        start = stop
    return Observations(document.model, document.dataset, join_spans(document.spans), tensors)
