"""The steps of a search through several formats: each takes one group of products to a wider format.

A group's formats have work and noise: its multiplications times their bits, which is what they take in a roofline
(`rates`) but for a constant, and the error that it alone adds to the outputs. Its steps go along the lower convex hull
of these, so each saves less noise for its work than the one before. Taken by falling utility, the steps of all groups
give the least noise for their work, if noises add up (Fox, "Discrete Optimization via Marginal Analysis", Management
Science 13, 1966; of quantizers: Shoham & Gersho, "Efficient Bit Allocation for an Arbitrary Set of Quantizers", IEEE
Transactions on ASSP 36, 1988).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.types import Precision
from pipeline.quantization.schemes.block_floats import FORMATS
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.search.rates import PRODUCT_FORMATS
from validation.reporting.quantization import decibels_text

# What an override calls floats. Those of 32 bits count as 16: a constant factor where there is one other format.
FLOAT: OverridePrecision = "fp16"
# Bits that a step adds at least: mxfp8 has 8.25, and a unit of it may have products in fp8.
_FEWEST_BITS = 0.25
_BROKEN = 1e30  # noise of outputs that are not finite, NaN too


def list_formats(precision: Precision) -> tuple[Precision, ...]:
    """The formats that a search may give products of a unit, beside floats: its own, and of block formats those that
    each generation with kernels for it has too."""
    is_mixed = precision in FORMATS and FORMATS[precision].activations
    return tuple(dict.fromkeys((precision, "fp8", "mxfp8"))) if is_mixed else (precision,)


def describe_alone(alone: Sequence[tuple[str, float | None]], precision: str) -> str:
    """'31.2 dB', or '14.2 dB in nvfp4, 27.3 dB in fp8' of other formats than `precision`."""
    is_named = len(alone) > 1 or any(name != precision for name, _ in alone)
    return ", ".join(decibels_text(value) + (f" in {name}" if is_named else "") for name, value in alone)


@dataclass(frozen=True)
class FormatStep:
    """One group's step to `format`. macs: the group's multiplications, times the step's part of the bits that floats
    have more than its first format.  utility: noise that it saves, over its work."""

    group: str
    format: str
    macs: float
    utility: float


def find_steps(macs: Mapping[str, float], noises: Mapping[str, Mapping[str, float]]) -> dict[str, FormatStep]:
    """The steps of all groups, the most useful first, by name: a group's first one has the group's name.

    macs: by group.  noises: by format, narrow ones first, and by group; a group begins with its first format.
    """
    steps = dict[str, FormatStep]()
    for name, count in sorted(macs.items()):
        noise = {form: by_group[name] for form, by_group in noises.items() if name in by_group}
        noise = {form: value if value < _BROKEN else _BROKEN for form, value in noise.items()}
        noise |= {FLOAT: 0.0}
        bits = {form: PRODUCT_FORMATS[form][0] for form in noise}
        precision, *wider = noise
        all_bits, utility = bits[FLOAT] - bits[precision], math.inf
        while wider:
            added_bits = {other: max(bits[other] - bits[precision], _FEWEST_BITS) for other in wider}
            best = max(wider, key=lambda other: (noise[precision] - noise[other]) / added_bits[other])
            utility = min(utility, (noise[precision] - noise[best]) / added_bits[best] / max(count, 1e-9))
            key = f"{name} {best}" if name in steps else name
            steps[key] = FormatStep(name, best, count * (added_bits[best] / all_bits), utility)
            precision, wider = best, wider[wider.index(best) + 1 :]
    return dict(sorted(steps.items(), key=lambda item: -item[1].utility))
