"""What the HTML report shows of a version, worked out from its document: plain values, no markup."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginery.core.parsing import mapping, number, text
from enginery.core.reports.proof import OVERLAP, Check
from enginery.core.types import PRECISIONS, BuildFailure
from enginery.registry.evidence.canaries import CanaryVerdict
from enginery.registry.manifest import EngineEntry
from validation.attribution.formatting import AttributionView, view_attribution
from validation.latency.view import LatencyView, view_latencies
from validation.reporting.distributions import ErrorDistribution, WorstRow, distributions, worst_cases
from validation.reporting.quantization import QuantizationSection, quantizations
from validation.reporting.stages import STAGES, DriftRow, StageSection, side_by_side, stages
from validation.reporting.version_document import VersionDocument

STATUSES = ("proven", "unproven", "failed", "refused")
_SYMBOLS = {"proven": "✓", "unproven": "?", "failed": "✕", "refused": "-"}


@dataclass(frozen=True)
class Headline:
    """Status and headline of the whole version."""

    status: str
    text: str


@dataclass(frozen=True)
class EngineRow:
    """An engine with what its row shows of its report.

    tightest: the check with the least room.  ran: whether it was run.
    """

    index: int
    entry: EngineEntry
    tightest: Check | None
    failed_checks: int
    total_checks: int
    ran: bool


@dataclass(frozen=True)
class SharedReason:
    """A reason, and whose it is: precisions, or units."""

    text: str
    whose: tuple[str, ...]


@dataclass(frozen=True)
class TargetGroup:
    """The engines of one target, with their reasons, each said once."""

    target: str
    engines: tuple[EngineRow, ...]
    reasons: tuple[SharedReason, ...]


@dataclass(frozen=True)
class EngineMatrix:
    """Engines by target and precision. rows: target, and a cell for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[EngineRow, ...], ...]], ...]


@dataclass(frozen=True)
class TaskPoint:
    """The task metric of a 'graph' or an 'engine'. at: percent along the axis."""

    name: str
    kind: str
    value: float
    at: float
    passed: bool


@dataclass(frozen=True)
class TaskSection:
    """The task metric of each graph and of each engine that was run, on one axis (least, greatest) with the floor."""

    name: str
    points: tuple[TaskPoint, ...]
    floor: float | None
    floor_at: float | None
    axis: tuple[float, float]


@dataclass(frozen=True)
class RepeatCommand:
    """The command that does again what failed."""

    unit: str
    command: str


@dataclass(frozen=True)
class FactGroup:
    """Titled facts."""

    title: str
    facts: Mapping[str, object]


@dataclass(frozen=True)
class VersionPage:
    """The names that the template uses. counts: engines by status.  groups: without what was refused."""

    manifest: VersionDocument
    reference: str
    engines: tuple[EngineRow, ...]
    groups: tuple[TargetGroup, ...]
    counts: Mapping[str, int]
    symbols: Mapping[str, str]
    verdict: Headline
    matrix: EngineMatrix
    tasks: TaskSection | None
    stages: Sequence[StageSection]
    stage_names: Sequence[str]
    beside: Sequence[DriftRow]
    distributions: Sequence[ErrorDistribution]
    worst: Sequence[WorstRow]
    quantizations: Sequence[QuantizationSection]
    attributions: Sequence[AttributionView]
    latencies: Sequence[LatencyView]
    canaries: Sequence[CanaryVerdict]
    again: Sequence[RepeatCommand]
    refusals: Sequence[SharedReason]
    failures: Sequence[BuildFailure]
    provenance: Sequence[FactGroup]


def overview(version: VersionDocument, pictures: bool = True) -> VersionPage:
    """What the page says. pictures: without them nothing that needs a picture is worked out."""
    engines = tuple(_engine(index, entry, version) for index, entry in enumerate(version.engines))
    counts = {status: sum(engine.entry.status == status for engine in engines) for status in STATUSES}
    reports = version.reports
    untouched = dict.fromkeys(_list_untouched(version))
    return VersionPage(
        manifest=version,
        reference=version.reference,
        engines=engines,
        groups=tuple(_by_target([engine for engine in engines if engine.entry.status != "refused"])),
        counts=counts,
        symbols=_SYMBOLS,
        verdict=_verdict(counts),
        matrix=_matrix(engines),
        tasks=_tasks(version, engines),
        stages=stages(reports),
        stage_names=list(STAGES),
        beside=side_by_side(reports),
        distributions=distributions(reports) if pictures else [],
        worst=worst_cases(reports),
        quantizations=quantizations(version.quantization, untouched) if pictures else [],
        attributions=[view_attribution(item) for item in version.attributions],
        latencies=view_latencies(version.latencies, pictures),
        canaries=version.canaries or (),
        again=list(_again(version.reference, engines)),
        refusals=_reasons((row.entry.reason, row.entry.unit) for row in engines if row.entry.status == "refused"),
        failures=version.failures,
        provenance=_provenance(version),
    )


def _list_untouched(version: VersionDocument) -> Iterator[str]:
    """Precisions of quantized engines whose graph is the exported model itself: its author quantized it."""
    original = version.sources.get("onnx")
    for entry in version.engines if original else ():
        if entry.precision in ("int8", "fp8") and entry.graph == original and entry.status != "refused":
            yield entry.precision


def _verdict(counts: Mapping[str, int]) -> Headline:
    proven, unproven, failed = (counts.get(status, 0) for status in ("proven", "unproven", "failed"))
    usable = proven + unproven
    if failed:
        rest = ", ".join(f"{counts[status]} {status}" for status in ("proven", "unproven") if counts[status])
        return Headline("failed", f"{_count(failed, 'engine')} failed; {rest or 'there is none to pull'}")
    if unproven:
        rest = f"{unproven} not yet run on their hardware"
        return Headline("unproven", f"{proven} of {_count(usable, 'engine')} proven, {rest}")
    if usable:
        return Headline("proven", f"{'All ' if usable > 1 else ''}{_count(usable, 'engine')} proven")
    return Headline("failed", "There is no engine to pull")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _engine(index: int, entry: EngineEntry, version: VersionDocument) -> EngineRow:
    checks = _checks_of(entry, version)
    limited = [check for check in checks if not check.passed or (check.joint != "task" and _has_room(check))]
    return EngineRow(
        index,
        entry,
        tightest=min(limited, key=headroom_db, default=None),
        failed_checks=sum(not check.passed for check in checks),
        total_checks=len(checks),
        ran=any(check.joint == "engine" for check in checks),
    )


def _checks_of(entry: EngineEntry, version: VersionDocument) -> tuple[Check, ...]:
    return next((report.checks for report in version.reports if report.unit == entry.unit), ())


def _again(reference: str, engines: Sequence[EngineRow]) -> Iterator[RepeatCommand]:
    """Commands that do again what failed: of a published engine the proof, else the build."""
    for row in engines:
        entry = row.entry
        if entry.status == "failed" and entry.digest:
            run = f"enginery validate {reference} --target {entry.target}"
            drifted = f"enginery attribute {reference} --target {entry.target} --precision {entry.precision}"
            yield RepeatCommand(entry.unit, f"{run}\n{drifted}")
        elif entry.status == "failed" and row.failed_checks:
            words = f"--target {entry.target} --precision {entry.precision} --backend {entry.backend}"
            yield RepeatCommand(entry.unit, f"enginery build SPEC.yaml {words}")


def _by_target(engines: Sequence[EngineRow]) -> Iterator[TargetGroup]:
    groups: dict[str, list[EngineRow]] = {}
    for row in engines:
        groups.setdefault(row.entry.target, []).append(row)
    for target, members in groups.items():
        reasons = _reasons((row.entry.reason, row.entry.precision) for row in members)
        yield TargetGroup(target, tuple(members), tuple(reason for reason in reasons if reason.text))


def _reasons(found: Iterable[tuple[str, str]]) -> list[SharedReason]:
    """Each reason once, with whose it is."""
    reasons: dict[str, list[str]] = {}
    for reason, whose in found:
        reasons.setdefault(reason, []).append(whose)
    return [SharedReason(reason, tuple(dict.fromkeys(whose))) for reason, whose in reasons.items()]


def _has_room(check: Check) -> bool:
    """Whether a check can be passed more or less narrowly: not a count that has to be 0, not the overlap of samples,
    and not a promise of the contract, most of which are kept or not, and the others on a scale of their own."""
    counted = check.limit == check.value == 0 or check.name == OVERLAP
    return check.limit is not None and not counted and not check.name.startswith("contract ")


def headroom_db(check: Check) -> float:
    """How far a value is from its limit, as a ratio in decibels; -inf for a failed check, so that it comes first."""
    if not check.passed:
        return -math.inf
    if check.value is None or check.limit is None or not _has_room(check):
        return math.inf
    if check.name.endswith("sqnr_db"):
        return check.value - check.limit
    if check.name.startswith("max_"):
        return _decibels(check.limit, check.value)
    return _decibels(1 - check.limit, 1 - check.value)


def _decibels(limit: float, value: float) -> float:
    if value <= 0:
        return math.inf
    return 20 * math.log10(limit / value) if limit > 0 else -math.inf


def _matrix(engines: Sequence[EngineRow]) -> EngineMatrix:
    targets = dict.fromkeys(row.entry.target for row in engines)
    columns = tuple(precision for precision in PRECISIONS if any(row.entry.precision == precision for row in engines))
    rows = ((target, tuple(_cell(engines, target, precision) for precision in columns)) for target in targets)
    return EngineMatrix(columns, tuple(rows))


def _cell(engines: Sequence[EngineRow], target: str, precision: str) -> tuple[EngineRow, ...]:
    return tuple(row for row in engines if (row.entry.target, row.entry.precision) == (target, precision))


def _tasks(version: VersionDocument, engines: Sequence[EngineRow]) -> TaskSection | None:
    metric = _metric(version)
    found = [(name, "graph", float(value)) for name, values in version.metrics.items() for value in values.values()]
    found += [(name, "engine", value) for name, value in _engine_tasks(version, engines)]
    if not found:
        return None
    floor = number(metric.get("floor"), "floor") if metric.get("floor") is not None else None
    axis = _axis([value for _, _, value in found] + ([floor] if floor is not None else []))
    points = tuple(
        TaskPoint(name, kind, value, _place(value, axis), floor is None or value >= floor)
        for name, kind, value in found
    )
    at = None if floor is None else _place(floor, axis)
    return TaskSection(text(metric.get("name", "metric"), "name"), points, floor, at, axis)


def _metric(version: VersionDocument) -> Mapping[str, object]:
    """What the spec says of its task metric; nothing where it has none."""
    golden = mapping(version.spec.get("golden") or {}, "spec.golden")
    return mapping(golden.get("metric") or {}, "spec.golden.metric")


def _engine_tasks(version: VersionDocument, engines: Sequence[EngineRow]) -> Iterator[tuple[str, float]]:
    for row in engines:
        values = [check.value for check in _checks_of(row.entry, version) if check.joint == "task"]
        if row.ran and values and values[-1] is not None:
            yield row.entry.unit, values[-1]


def _axis(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    pad = max((high - low) * 0.15, 0.005)
    return max(0.0, low - pad) if low >= 0 else low - pad, min(1.0, high + pad) if high <= 1 else high + pad


def _place(value: float, axis: tuple[float, float]) -> float:
    """Percent along the axis."""
    low, high = axis
    return round(100 * (value - low) / (high - low), 2) if math.isfinite(value) and high > low else 0.0


def _provenance(version: VersionDocument) -> list[FactGroup]:
    """Titled groups of facts; digests are set in a fixed-width face."""
    groups: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("Identity", {"content": version.content, "version report": version.report}),
        ("What went in", version.provenance),
        ("What was made of it", version.sources),
        ("Toolchain", version.toolchain),
        ("Host", version.host),
    )
    found = [FactGroup(title, {k: v for k, v in facts.items() if v is not None}) for title, facts in groups]
    return [group for group in found if group.facts]
