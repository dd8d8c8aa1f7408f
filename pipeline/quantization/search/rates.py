"""Peak rates of devices, and bits of the formats of products, by which costs are modelled (`costs`)."""

from dataclasses import dataclass, replace
from typing import Literal

from enginesmith.core.hardware.cpu_kinds import KINDS, kind_of
from enginesmith.core.types import Target

# The error of modelled int8 speedups of ONNX Runtime, for ResNet-18, MiniLM and a small encoder at batches 1 and 8, on
# a loaded machine with AVX-512 and VNNI. The modelled speedup of a model of 0.05 ms was three times the measured one.
# None was too low. `python -m benchmarks.bench_cpu_int8` prints both.
ERROR = "on a CPU 4 to 61 % above what int8 measured, unchecked on GPUs"

FloatPrecision = Literal["fp32", "fp16"]
# Bits of a weight and of an activation in a format of products, with their part of a block's scale. None: activations
# stay floats, and products are computed in floats.
PRODUCT_FORMATS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("int8", "int8-dynamic", "fp8"), (8, 8)),
    "mxfp8": (8.25, 8.25),
    "nvfp4": (4.5, 4.5),
    "nvfp4-weights": (4.5, None),
    "int4": (4.125, None),
    "fp16": (16, None),
}


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a device. fp32, fp16, eight_bits, four_bits: operations per second.  floats: the precision of
    everything that is not narrow.  node_s: fixed seconds of each kernel."""

    source: str
    fp32: float
    fp16: float
    eight_bits: float
    four_bits: float
    bytes_per_s: float
    floats: FloatPrecision = "fp32"
    node_s: float = 0.0

    def with_floats(self, precision: FloatPrecision) -> "Peaks":
        """The same rates with another precision of floats; a CPU always has fp32."""
        return self if self.node_s else replace(self, floats=precision)

    def rate(self, precision: str | None) -> float:
        """Operations per second in a format of `PRODUCT_FORMATS`; in floats for None."""
        bits = PRODUCT_FORMATS[precision][1] if precision else None
        if bits is None:
            return self.fp32 if self.floats == "fp32" else self.fp16
        return self.four_bits if bits < 8 else self.eight_bits


# fp16 TFLOP/s of dense products and GB/s by NVIDIA's data sheets, of one product of each generation: T4, A100 (40 GB),
# A10, L4, H100 (SXM), B200, RTX PRO 6000, GB10. int8 and fp8 are twice as fast as fp16, nvfp4 four times, and
# TensorFloat-32, which fp32 uses except on sm_75, is half as fast.
_GPUS = {75: (65, 320), 80: (312, 1555), 86: (125, 600), 89: (121, 300), 90: (989, 3350)}
_GPUS |= {100: (2250, 8000), 120: (500, 1792), 121: (125, 273)}
PEAKS = {
    f"sm_{sm}": Peaks(
        f"peak rates of sm_{sm}", (0.5 if sm > 75 else 0.125) * rate, rate, 2 * rate, 4 * rate, 1e9 * band
    )
    for sm, (teraflops, band) in _GPUS.items()
    for rate in [1e12 * teraflops]
}
# `measure_roofs` measured the rates of a CPU on two cores with AVX-512 and VNNI, where int8 products were 3.9 times as
# fast as fp32's; half of that is assumed where pairs of int8 products are added in 16 bits.
PEAKS |= {
    f"cpu, {bits}-bit sums": Peaks(
        f"a CPU with {bits}-bit sums of int8", 112e9, 112e9, speedup * 112e9, 112e9, 31e9, node_s=0.24e-6
    )
    for bits, speedup in {32: 3.9, 16: 1.95}.items()
}


def name_rates(target: Target) -> str:
    """The name of a target's rates in `PEAKS`, which lacks some generations."""
    saturates = any(kind.saturates for kind in KINDS if target.is_cpu and kind.name == kind_of(target))
    return f"cpu, {16 if saturates else 32}-bit sums" if target.is_cpu else target.sm


def peaks_of(target: Target, floats: FloatPrecision) -> Peaks | None:
    """Peak rates of a target; None if `PEAKS` lacks its generation."""
    peaks = PEAKS.get(name_rates(target))
    return peaks and peaks.with_floats(floats)
