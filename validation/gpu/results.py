"""The JSON of the kit's results: the device, the tries, and their outcomes.

kind, format, created_at      'enginesmith-gpu-results', 1, ISO 8601 in UTC
device, host, software        what was measured, and by which versions
peaks                         the roofs, measured by torch
models                        the kit's own: operations and compulsory bytes of a run at each batch
tries                         each with kind ('engine', 'other generation', 'any generation', 'peer'), outcome, reason,
                              checks, latency, races
skipped                       what was not tried, and why
carried                       published engines with their answers, for `enginesmith validate --import`

Fields that were not measured are left out. `enginesmith.core.codec` writes and reads all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.core import parsing
from enginesmith.core.codec import OMIT_NONE, decode, encode
from enginesmith.core.digest import canonical_json
from enginesmith.core.errors import IntegrityError
from enginesmith.core.reports.latency import Quantile, Ratio
from enginesmith.core.reports.proof import Answers, Check
from enginesmith.core.types import Scalar
from validation.gpu.devices import KitDevice
from validation.gpu.peaks import Peaks

KIND, FORMAT = "enginesmith-gpu-results", 1
# Answers of carried engines are in it.
MAX_BYTES = 1 << 30
Outcome = Literal["passed", "wrong", "build failed", "load failed", "run failed", "crashed", "not finished", "skipped"]


@dataclass(frozen=True)
class DeviceLatency:
    """Seconds of a run on the device itself, without copies: the median and the 0.1 and 0.9 quantiles."""

    runs: int
    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class BatchLatency:
    """Latency at one size, copies included. shapes: of each input.  steady: whether the warm-up came to an end.

    busy: why the machine counts as busy meanwhile.  device: None where the session does not give its device's time.
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
    """A paired benchmark of an engine and PyTorch (`validation.latency.measurement.paired`), or why there was none."""

    peer: str
    reason: str | None = field(default=None, metadata=OMIT_NONE)
    batch: int | None = field(default=None, metadata=OMIT_NONE)
    verdict: str | None = field(default=None, metadata=OMIT_NONE)
    ratios: tuple[Ratio, ...] | None = field(default=None, metadata=OMIT_NONE)
    medians_s: tuple[float, float] | None = field(default=None, metadata=OMIT_NONE)
    runs: int | None = field(default=None, metadata=OMIT_NONE)
    openings: int | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of one try. outcome: an `Outcome`.  load_s, load_again_s: of the first opening and the next.

    took_s: of its process in all.  races: comparisons with PyTorch.  answers: of a carried engine.
    """

    outcome: str = "not finished"
    name: str | None = field(default=None, metadata=OMIT_NONE)
    reason: str | None = field(default=None, metadata=OMIT_NONE)
    took_s: float | None = field(default=None, metadata=OMIT_NONE)
    build_s: float | None = field(default=None, metadata=OMIT_NONE)
    size_bytes: int | None = field(default=None, metadata=OMIT_NONE)
    notes: tuple[str, ...] | None = field(default=None, metadata=OMIT_NONE)
    load_s: float | None = field(default=None, metadata=OMIT_NONE)
    checks: tuple[Check, ...] | None = field(default=None, metadata=OMIT_NONE)
    load_again_s: float | None = field(default=None, metadata=OMIT_NONE)
    latency: tuple[BatchLatency, ...] | None = field(default=None, metadata=OMIT_NONE)
    races: tuple[PeerComparison, ...] | None = field(default=None, metadata=OMIT_NONE)
    versions: Mapping[str, str] | None = field(default=None, metadata=OMIT_NONE)
    answers: Answers | None = field(default=None, metadata=OMIT_NONE)


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
    """A try of a published engine. manifest, golden, engine: digests."""

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
    """A try that was not made. refused: by the backend; else the backend is not installed, or not for this target."""

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
    """The costs of a run at one batch. least_s: the least time by the roofs; None without roofs."""

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
    """All results, as the module describes. seconds: of each latency.  size: of the kit's models."""

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
        if document.get("format") != FORMAT:
            raise IntegrityError(f"results of format {str(document.get('format'))[:40]}; this version reads {FORMAT}")
        try:
            return decode(document, cls)
        except IntegrityError as error:
            raise IntegrityError(f"these results of the GPU kit are not whole ({error}); run the kit again") from error

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read a file of results. Raises IntegrityError for anything else."""
        try:
            return cls.from_json(parsing.load_json(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{path}: no results of the GPU kit: {str(error)[:120]}") from error
