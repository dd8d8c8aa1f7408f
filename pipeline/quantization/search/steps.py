"""The steps of a search through several formats: each takes one group of products to a wider format.

In each format, a group has a work and a noise. The work is its multiplications times the format's bits, which is
proportional to its time in a roofline (`rates`). The noise is the error of the outputs when only this group is
quantized. A group's steps follow the lower convex hull of its points (work, noise), so each step removes less noise
per work than the step before. If the steps of all groups are taken in this order and noises add up, every total work
has the least noise (Fox, "Discrete Optimization via Marginal Analysis", Management Science 13, 1966; for quantizers:
Shoham & Gersho, "Efficient Bit Allocation for an Arbitrary Set of Quantizers", IEEE Transactions on ASSP 36, 1988).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.types import Precision
from pipeline.quantization.schemes.overrides import ProductPrecision
from pipeline.quantization.search.rates import PRODUCT_FORMATS
from validation.reporting.quantization import decibels_text

# The name of floats in overrides. Floats of 32 bits count as 16 bits here.
FLOAT: ProductPrecision = "fp16"
# The least number of bits that a step counts: a step may go from mxfp8 to fp8, which has fewer bits.
_FEWEST_BITS = 0.25
_WIDER: Mapping[Precision, tuple[Precision, ...]] = {"nvfp4": ("fp8", "int8", "mxfp8"), "mxfp8": ("fp8",)}
_BROKEN = 1e30  # noise of outputs that are not finite, NaN too


def list_formats(precision: Precision) -> tuple[Precision, ...]:
    """The formats that a search may choose for products of a unit, besides floats. A generation with kernels for the
    first has kernels for the others. In an mxfp8 unit, int8 would take nearly every group, as it has fewer bits."""
    return (precision, *_WIDER.get(precision, ()))


def describe_alone(alone: Sequence[tuple[str, float | None]], precision: str) -> str:
    """'31.2 dB' if `precision` is the only format, else '14.2 dB in nvfp4, 27.3 dB in fp8'."""
    is_named = len(alone) > 1 or any(name != precision for name, _ in alone)
    return ", ".join(decibels_text(value) + (f" in {name}" if is_named else "") for name, value in alone)


@dataclass(frozen=True)
class FormatStep:
    """A step of one group to the wider `format`.

    macs: the group's multiplications, times the bits that this step adds, divided by the bits from the group's first
    format to floats.  utility: the noise that the step removes, divided by the work that it adds.
    """

    group: str
    format: str
    macs: float
    utility: float


def find_steps(macs: Mapping[str, float], noises: Mapping[str, Mapping[str, float]]) -> dict[str, FormatStep]:
    """The steps of all groups by name, highest utility first. The first step of a group has the group's name.

    macs: multiplications by group.  noises: by format, narrowest first, and by group; a group starts in its narrowest
    format.
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
