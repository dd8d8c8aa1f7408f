"""Calibrated ranges, and notes on what quantization changed."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from enginesmith.core.codec import decode
from enginesmith.core.errors import DataError, IntegrityError, digest_of
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.text import join_first, pluralize

_LEFT = "left in"
# The least share of multiplications with weights in a narrow format; an engine with less is refused. At twice the speed
# of float, a tenth saves 5 % of the time, and the name of the precision would be wrong for most of the engine.
LEAST_SHARE = 0.1


def describe_share(share: float, precision: str) -> str:
    """'98.8 % of the multiplications with weights are in int8'."""
    return f"{100 * share:.1f} % of the multiplications with weights are in {precision}"


def refuse_share(share: float | None, precision: str, why: str = "") -> str | None:
    """Why a graph with this share of multiplications in `precision` is refused; None if it is at least `LEAST_SHARE`,
    or if the share is None. why: which nodes are left in float, and why."""
    if share is None or share >= LEAST_SHARE:
        return None
    reason_text, tenths = f"; {why}" if why else "", math.floor(1000 * share)  # rounded down: 9.99 % is less than 10 %
    minimum_text = f"minimum {100 * LEAST_SHARE:.0f} %"
    return f"only {tenths / 10:.1f} % of the multiplications would be in {precision} ({minimum_text}){reason_text}"


def _explain_idle(lines: Sequence[str]) -> str:
    """The first line of a graph's notes, with the two most frequent reasons why nodes are not in its precision."""
    lines_by_reason = defaultdict[str, list[str]](list)
    for line in lines[1:]:
        if line.startswith(_LEFT):
            lines_by_reason[line.partition("): ")[2]].append(line)
    reasons = [reason_group[0] for reason_group in sorted(lines_by_reason.values(), key=len, reverse=True)]
    return "; ".join([lines[0], *reasons[:2], *(["..."] if reasons[2:] else [])])


def _count_computing(count: int) -> str:
    return pluralize(count, "node computes in", "nodes compute in")


@dataclass(frozen=True)
class CastNotes:
    """Result of casting a graph.

    cast: number of nodes that now compute in `precision`.  underflowed: constant -> (values that became zero, values).
    floored_scales: Q/DQ scales that were raised to the smallest normal number, because smaller ones can become zero.
    float_nodes: nodes that stay in float, with the reason.
    """

    precision: str
    cast: int
    float_nodes: tuple[FloatNode, ...] = ()
    underflowed: tuple[tuple[str, int, int], ...] = ()
    floored_scales: tuple[str, ...] = ()

    @property
    def idle(self) -> str | None:
        """Why no node computes in the precision; None if one does."""
        return None if self.cast else _explain_idle(self.lines())

    def lines(self) -> tuple[str, ...]:
        """The notes as sentences."""
        float_text = pluralize(len(self.float_nodes), "stays", "stay")
        summary = f"{_count_computing(self.cast)} {self.precision}, {float_text} in fp32"
        zero_texts = [f"{name}: {count} of {size} values underflow to 0" for name, count, size in self.underflowed]
        if self.floored_scales:
            scale_names = join_first(self.floored_scales, 3)
            zero_texts.append(
                f"{len(self.floored_scales)} Q/DQ scales were raised to the smallest normal number: {scale_names}"
            )
        return (summary, *_kept_lines(self.float_nodes, "fp32"), *zero_texts)


@dataclass(frozen=True)
class QuantizationNotes:
    """Result of inserting Q/DQ.

    quantized: names of the nodes that now compute in `precision`.  float_nodes: candidates left in float.
    passed_through: the model already had Q/DQ and did not change.  cast: of the other nodes to fp16.
    precision: of the quantized nodes (only of their weights, in weight-only formats).
    eight_bits: candidates of a block format that compute in fp8 or mxfp8 instead.  formats: of these, by node.
    """

    quantized: tuple[str, ...] = ()
    float_nodes: tuple[FloatNode, ...] = ()
    passed_through: bool = False
    cast: CastNotes | None = None
    precision: str = "int8"
    eight_bits: tuple[FloatNode, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)

    @property
    def idle(self) -> str | None:
        """Why no node computes in the precision; None if one does, or if the model was already quantized."""
        return None if self.quantized or self.passed_through else self.explain()

    def explain(self) -> str:
        """How many nodes compute in the precision, and the two most frequent reasons why others do not."""
        return _explain_idle(self.lines())

    def lines(self) -> tuple[str, ...]:
        """The notes as sentences."""
        if self.passed_through:
            return ("the model already carries quantized nodes and passed through untouched",)
        float_text = pluralize(len(self.float_nodes), "candidate stays", "candidates stay")
        summary = f"{_count_computing(len(self.quantized))} {self.precision}, {float_text} in float"
        lines = self.cast.lines() if self.cast else ()
        wider_lines = [f"in {self.formats[node.node]}: {node}" for node in self.eight_bits]
        return (summary, *wider_lines, *_kept_lines(self.float_nodes, "float"), *lines)


def _kept_lines(float_nodes: Sequence[FloatNode], place: str) -> list[str]:
    return [f"{_LEFT} {place}: {node}" for node in float_nodes]


# The version of the JSON file between calibration and Q/DQ insertion.
FORMAT = 1

Pair = tuple[float, float]


@dataclass(frozen=True)
class RangeSource:
    """Source of a range. seen: extremes.  histogram: its digest, if any.  clipped: share of the values outside of the
    range."""

    seen: Pair
    histogram: str | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class Ranges:
    """For each tensor, the (lowest, highest) value that its quantized form must hold.

    method: that chose the ranges, e.g. 'minmax' or 'mse int8'.  dataset: digest of the calibration data.
    samples: the number of observed samples.  sources: of the ranges, if known.
    """

    tensors: Mapping[str, Pair]
    method: str
    dataset: str
    samples: int
    sources: Mapping[str, RangeSource] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Digest over method and ranges alone: other data with the same ranges makes the same engine."""
        tensors = {name: list(self.tensors[name]) for name in sorted(self.tensors)}
        return digest_of({"method": self.method, "tensors": tensors})

    def reach(self, tensor: str) -> float | None:
        """The largest observed magnitude of a tensor, also if it is clipped; None if it was not measured."""
        value_range = self.sources[tensor].seen if tensor in self.sources else self.tensors.get(tensor)
        return None if value_range is None else max(abs(value_range[0]), abs(value_range[1]))

    def to_json(self) -> dict[str, object]:
        """A JSON object that `from_json` reads back."""
        source_documents = {
            name: {"seen": list(source.seen), "histogram": source.histogram, "clipped": source.clipped}
            for name, source in self.sources.items()
        }
        names = sorted(self.tensors)
        return {
            "format": FORMAT,
            "method": self.method,
            "dataset": self.dataset,
            "samples": self.samples,
            "tensors": {name: {"range": list(self.tensors[name]), **source_documents.get(name, {})} for name in names},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Ranges":
        """Read the result of `to_json`. Raises DataError for anything else, also for a reversed or non-finite range."""
        try:
            document = decode(dict(data), _RangesDocument)
        except IntegrityError as error:
            raise DataError(f"ranges: not a ranges file ({error}); calibrate again") from error
        if document.format != FORMAT:
            raise DataError(f"ranges: format {document.format!r} is not {FORMAT}; calibrate again")
        for name, entry in document.tensors.items():
            for low, high in filter(None, (entry.range, entry.seen)):
                if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                    raise DataError(
                        f"ranges: tensor {name!r} has the range [{low}, {high}]; give finite ends, the lower first"
                    )
        tensors = {name: entry.range for name, entry in document.tensors.items()}
        sources = {
            name: RangeSource(entry.seen, entry.histogram, entry.clipped)
            for name, entry in document.tensors.items()
            if entry.seen
        }
        return cls(tensors, document.method, document.dataset, document.samples, sources)


@dataclass(frozen=True)
class _StoredRange:
    range: Pair
    seen: Pair | None = None
    histogram: str | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class _RangesDocument:
    """The document that `Ranges.to_json` writes."""

    format: int
    method: str
    dataset: str
    samples: int
    tensors: Mapping[str, _StoredRange]
