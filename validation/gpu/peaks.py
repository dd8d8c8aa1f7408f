"""Peak rates of a device, measured by torch: the roofs of a roofline (Williams, Waterman & Patterson, 2009).

Bytes a second: one large array copied to another (one is read, one is written). Operations a second: a product of
square matrices in each type, of random numbers, as a GPU multiplies ones at a higher clock. The cost of a launch: an
addition to one number. Each is the best of several tries, timed by CUDA events, or by the clock on the CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from validation.latency.measurement.loop import time_call

if TYPE_CHECKING:
    import torch


def seconds_of(run: Callable[[], object], device: str, runs: int) -> list[float]:
    """Seconds of each of `runs` calls, after one that is not counted. device: 'cuda' or 'cpu', as in torch."""
    import torch

    run()
    if device == "cpu":
        return [time_call(run) for _ in range(runs)]
    pairs = []
    for _ in range(runs):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begun.record()
        run()
        ended.record()
        pairs.append((begun, ended))
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairs]


# Elements of a copied array and sides of multiplied matrices, by device; the CPU's are only to run the same code.
_COPIED = {"cuda": 1 << 28, "cpu": 1 << 20}
_SIDE = {"cuda": 8192, "cpu": 128}
_SECONDS = {"cuda": 0.5, "cpu": 0.01}


@dataclass(frozen=True)
class Peaks:
    """The peak rates. operations_per_s: by type ('tf32' is float32 in TF32).  launch_s: of one small operation.

    missing: types that could not be measured, with the reason.
    """

    bytes_per_s: float
    operations_per_s: Mapping[str, float]
    launch_s: float
    missing: Mapping[str, str] = field(default_factory=dict)

    def least_s(self, operations: float, moved_bytes: float, kind: str) -> float | None:
        """The least time of so many operations of a type and bytes: the longer of the two; None without that type."""
        rate = self.operations_per_s.get(kind)
        return None if rate is None else max(operations / rate, moved_bytes / self.bytes_per_s)


def measure_peaks(device: str) -> Peaks:
    """Measure the peak rates; takes some seconds on a GPU."""
    import torch

    bandwidth = _bandwidth(device)
    one = torch.ones(1, device=device)
    launch = _best(lambda: one.add_(1.0), device)
    rates, missing = {}, {}
    for kind, made in _products(device).items():
        try:
            rates[kind] = 2.0 * _SIDE[device] ** 3 / _with_tf32(kind == "tf32", lambda made=made: _best(made(), device))  # type: ignore[misc]  # bound at once
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            missing[kind] = " ".join(str(error).split())[:160]
    return Peaks(bandwidth, rates, launch, missing)


def _bandwidth(device: str) -> float:
    import torch

    source = torch.ones(_COPIED[device], dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * source.element_size() / _best(lambda: target.copy_(source), device)


def _products(device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """By type: a function that makes two matrices and returns a function that multiplies them."""
    import torch

    side = _SIDE[device]

    def plain(dtype: "torch.dtype") -> Callable[[], Callable[[], object]]:
        def make_product() -> Callable[[], object]:
            left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            return lambda: torch.mm(left, right)

        return make_product

    def whole() -> Callable[[], object]:
        left, right = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(left, right.t())

    def eighth() -> Callable[[], object]:
        left, right = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)

    found = {"float32": plain(torch.float32), "float16": plain(torch.float16), "bfloat16": plain(torch.bfloat16)}
    extra = {"tf32": plain(torch.float32), "fp8": eighth} if device == "cuda" else {}
    return {**found, **extra, "int8": whole}


def _with_tf32(allowed: bool, measure: Callable[[], float]) -> float:
    """`measure` with TF32, which rounds float32 inputs, allowed or not; the setting is restored."""
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if allowed else "ieee"
    try:
        return measure()
    finally:
        settings.fp32_precision = before


def _best(run: Callable[[], object], device: str) -> float:
    """The least time of as many calls as take about `_SECONDS`, from 3 to 2000."""
    each = min(seconds_of(run, device, 3))
    return min(seconds_of(run, device, max(3, min(2000, int(_SECONDS[device] / max(each, 1e-9))))))
