"""Results of the GPU kit, and peak rates of devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from enginesmith.core import parsing
from enginesmith.core.codec import decode, document_error, encode, explain_damage, refuse_newer
from enginesmith.core.errors import IntegrityError, canonical_json
from enginesmith.core.reports.latency import Quantile, Ratio
from enginesmith.core.reports.proof import Answers, Check
from enginesmith.core.types import Scalar
from validation.gpu.devices import KitDevice
from validation.latency.measurement.loop import time_call

if TYPE_CHECKING:
    import torch

# Peak rates of a device, measured by torch: the roofs of a roofline (Williams, Waterman & Patterson, 2009).
#
# Bytes per second: one large array copied to another (one is read, one is written). Operations per second: a product of
# square matrices of random numbers in each type (a GPU multiplies ones at a higher clock). The cost of a launch: an
# addition to one number. Each is the best of several tries, timed by CUDA events, or by the clock on the CPU.


def seconds_of(run: Callable[[], object], device: str, runs: int) -> list[float]:
    """Seconds of each of `runs` calls, after one call that does not count. device: 'cuda' or 'cpu', as in torch."""
    import torch

    run()
    if device == "cpu":
        return [time_call(run) for _ in range(runs)]
    pairs = []
    for _ in range(runs):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start_event.record()
        run()
        end_event.record()
        pairs.append((start_event, end_event))
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) / 1e3 for start_event, end_event in pairs]


# Elements of the copied array and sides of the matrices, by device; on the CPU only the code is tried.
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
        """The least seconds for operations of type `kind` and moved bytes: the longer of both; None without a rate."""
        rate = self.operations_per_s.get(kind)
        return None if rate is None else max(operations / rate, moved_bytes / self.bytes_per_s)


def measure_peaks(device: str) -> Peaks:
    """Measure the peak rates; takes some seconds on a GPU."""
    import torch

    bandwidth = _bandwidth(device)
    unit = torch.ones(1, device=device)
    launch_s = _best(lambda: unit.add_(1.0), device)
    rates, failures = {}, {}
    for kind, call in _products(device).items():
        try:
            rates[kind] = 2.0 * _SIDE[device] ** 3 / _with_tf32(kind == "tf32", lambda call=call: _best(call(), device))  # type: ignore[misc]  # bound at once
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            failures[kind] = " ".join(str(error).split())[:160]
    return Peaks(bandwidth, rates, launch_s, failures)


def _bandwidth(device: str) -> float:
    import torch

    source = torch.ones(_COPIED[device], dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * source.element_size() / _best(lambda: target.copy_(source), device)


def _products(device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """By type: a function that creates two matrices and returns a function that multiplies them."""
    import torch

    size = _SIDE[device]

    def plain(dtype: "torch.dtype") -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return lambda: torch.mm(left, right)

    def whole() -> Callable[[], object]:
        left, right = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(left, right.t())

    def eighth() -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)

    products: dict[str, Callable[[], Callable[[], object]]] = {}
    for name in ("float32", "float16", "bfloat16"):
        products[name] = partial(plain, getattr(torch, name))
    if device == "cuda":
        products |= {"tf32": partial(plain, torch.float32), "fp8": eighth}
    return products | {"int8": whole}


def _with_tf32(is_allowed: bool, measure: Callable[[], float]) -> float:
    """The result of `measure` with TF32, which rounds float32 inputs, on or off; restores the setting."""
    import torch

    settings = torch.backends.cuda.matmul
    precision = settings.fp32_precision
    settings.fp32_precision = "tf32" if is_allowed else "ieee"
    try:
        return measure()
    finally:
        settings.fp32_precision = precision


def _best(run: Callable[[], object], device: str) -> float:
    """The least seconds of a call, over the 3 to 2000 calls that take about `_SECONDS`."""
    run_s = min(seconds_of(run, device, 3))
    return min(seconds_of(run, device, max(3, min(2000, int(_SECONDS[device] / max(run_s, 1e-9))))))


# The JSON of the kit's results: the device, the tries, and their outcomes.
#
# kind, format, created_at      'enginesmith-gpu-results', 1, ISO 8601 in UTC
# device, host, software        the measured device, its host, and the versions
# peaks                         the roofs, measured by torch
# models                        the kit's own: operations and compulsory bytes of a run at each batch
# tries                         each with kind ('engine', 'other generation', 'peer'), outcome, reason, checks, latency,
#                               races
# skipped                       tries that were not made, and the reason
# carried                       published engines with their answers, for `enginesmith validate --import`
#
# Fields that were not measured are left out. `enginesmith.core.codec` writes and reads this JSON.

KIND, FORMAT = "enginesmith-gpu-results", 1
# The greatest size of a file of results, which contains the answers of carried engines.
MAX_BYTES = 1 << 30
Outcome = Literal[
    "passed", "wrong", "recorded", "build failed", "load failed", "run failed", "crashed", "not finished", "skipped"
]


@dataclass(frozen=True)
class DeviceLatency:
    """Seconds of a run on the device itself, without copies: the median and the 0.1 and 0.9 quantiles."""

    runs: int
    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class BatchLatency:
    """Latency at one size, copies included. shapes: of each input.  steady: whether the warm-up ended.

    busy: reasons why the machine counted as busy.  device: None if the session does not measure its device's time.
    batch: samples per run.  quantiles: with intervals.
    """

    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    runs: int
    steady: bool
    median_s: float
    quantiles: tuple[Quantile, ...]
    busy: tuple[str, ...] = ()
    device: DeviceLatency | None = None


@dataclass(frozen=True)
class PeerComparison:
    """A paired benchmark of an engine and PyTorch (`validation.latency.measurement.paired`), or a reason for none.

    peer: how PyTorch ran the graph.  reason: why there is no benchmark, or None.  batch: samples per run.
    verdict, ratios, medians_s, runs, openings: as in `PairedTimes`.
    """

    peer: str
    reason: str | None = None
    batch: int | None = None
    verdict: str | None = None
    ratios: tuple[Ratio, ...] | None = None
    medians_s: tuple[float, float] | None = None
    runs: int | None = None
    openings: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of one try. load_s, load_again_s: seconds of the first and the second opening.

    took_s: total seconds of the process.  races: comparisons with PyTorch.  answers: of a carried engine.
    reason: why the try did not finish.  checks: against the golden cases.  latency: at each size.
    """

    outcome: str = "not finished"
    name: str | None = None
    reason: str | None = None
    took_s: float | None = None
    build_s: float | None = None
    size_bytes: int | None = None
    notes: tuple[str, ...] | None = None
    load_s: float | None = None
    checks: tuple[Check, ...] | None = None
    load_again_s: float | None = None
    latency: tuple[BatchLatency, ...] | None = None
    races: tuple[PeerComparison, ...] | None = None
    versions: Mapping[str, str] | None = None
    answers: Answers | None = None


@dataclass(frozen=True, kw_only=True)
class KitTrial(TrialOutcome):
    """A try of an engine of a kit's model, or of PyTorch. model: 'mlp fp16'.  options: of the backend."""

    kind: str
    model: str
    precision: str
    backend: str
    built_for: str
    options: Mapping[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class OfflineTrial(TrialOutcome):
    """A try of a published engine. manifest, golden, engine: digests.  model, version, unit: names of the engine.
    created_at: time of the try, ISO 8601, UTC."""

    model: str
    version: str
    manifest: str
    golden: str
    engine: str
    build_key: str
    unit: str
    created_at: str


@dataclass(frozen=True)
class Skipped:
    """A try that was not made. refused: whether the backend refused it; else the backend is missing or unsuitable."""

    name: str
    model: str
    backend: str
    precision: str
    built_for: str
    reason: str
    refused: bool = False
    kind: str = ""


@dataclass(frozen=True)
class BatchCosts:
    """The costs of a run at one batch. least_s: the least seconds by the roofs; None without roofs."""

    batch: int
    operations: int
    moved_bytes: int
    least_s: float | None


@dataclass(frozen=True)
class ModelCosts:
    """The costs of one of the kit's models by batch, the smallest first."""

    model: str
    sizes: tuple[BatchCosts, ...]


@dataclass(frozen=True)
class Results:
    """All results, as the comment above lists them. seconds: per latency.  size: of the kit's models.  created_at: ISO
    8601, UTC.  device, host, software: where the results were measured.  peaks: None if they were not measured."""

    created_at: str
    device: KitDevice
    host: Mapping[str, str]
    software: Mapping[str, str]
    peaks: Peaks | None
    models: tuple[ModelCosts, ...]
    tries: tuple[KitTrial, ...]
    skipped: tuple[Skipped, ...]
    carried: tuple[OfflineTrial, ...]
    seconds: float
    size: str
    kind: str = KIND
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Canonical JSON, keys sorted."""
        return canonical_json(encode(self))

    @classmethod
    def from_json(cls, document: object) -> "Results":
        """Read the parsed JSON of `to_bytes`. Raises IntegrityError for anything else."""
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise IntegrityError("no results of the GPU kit; `python -m validation.gpu --out FILE` writes them")
        refuse_newer("results of the GPU kit", document.get("format"), FORMAT)
        if document.get("format") != FORMAT:
            raise IntegrityError(f"results of format {str(document.get('format'))[:40]}; this version reads {FORMAT}")
        with explain_damage("these results of the GPU kit are incomplete or invalid", "run the kit again"):
            return decode(document, cls)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read a file of results. Raises IntegrityError for anything else."""
        try:
            return cls.from_json(parsing.load_json(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{path}: no results of the GPU kit: {str(error)[:120]}") from error
        except IntegrityError as error:
            raise document_error(str(path), error) from error
