"""Verdicts of canaries: each is of one run of a published version on one target, a GPU generation or a kind of CPU.

They are stored beside the manifest, which does not change, and are deleted with the version. Each names the canary's
report, a blob. Several runs on a target give one verdict (`verdict_on`), where a FAIL outweighs a PASS.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from enginesmith.core.codec import Excerpt, decode, encode
from enginesmith.core.constraints import Format
from enginesmith.core.digest import Digest, canonical_json
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.hardware.cpu_kinds import kind_named
from enginesmith.core.hardware.evaluation import judge
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.requirements import hardware_of
from enginesmith.core.types import Target
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import canary_key, evidence_prefix

FORMAT = 1
MAX_BYTES = 1 << 16
# The target of observations that do not say where they were made; it counts for no channel.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class CanaryVerdict(Excerpt):
    """The verdict of a canary on one target. target: 'sm_89', or the kind of CPU.  engine: digest of the candidate's.

    baseline: digest of the manifest it was compared with.  against: that version.  report: digest of the report's blob.
    created_at: ISO 8601, UTC.
    """

    target: Name
    verdict: Literal["PASS", "FAIL", "INSUFFICIENT"]
    reason: str
    engine: Digest
    unit: str
    baseline: Digest
    against: Name
    report: Digest
    created_at: str


@dataclass(frozen=True)
class _StoredVerdict(Excerpt):
    format: Annotated[int, Format(FORMAT)]


def attach_canary(store: Store, manifest: Manifest, found: CanaryVerdict) -> None:
    """Store a verdict beside its version; nothing changes if it is there already.

    Raises IntegrityError if its report is not stored, InputError for an engine that the version does not have or that
    does not run on the target, and for a verdict with malformed fields.
    """
    entry = next((entry for entry in manifest.engines if entry.digest == found.engine), None)
    if entry is None:
        raise InputError(
            f"the canary ran engine {found.engine}, which {manifest.model}@{manifest.version} does not have"
        )
    data = canonical_json({"format": FORMAT, **encode(found)})
    try:
        _read(data)
    except Malformed as error:
        raise InputError(f"the canary's report does not say what was compared, and where: {error}") from None
    if found.target != UNKNOWN:
        # Whether the engine may have run there, by what it was built for.
        capability = parse_targets(found.target)[0].compute_capability if found.target.startswith("sm_") else None
        processor = hardware_of(entry.requires)
        if processor is None or judge(processor, Machine(capability)).state == "unmet":
            raise InputError(f"the canary's report is not in order: {entry.unit} does not run on {found.target}")
    if not store.has(found.report):
        raise IntegrityError(f"canary report {found.report} is not in {store.uri}; run the canary again")
    key = canary_key(manifest.model, manifest.version, found.target, found.report)
    store.create(key, data)


def canaries(store: Store, manifest: Manifest) -> list[CanaryVerdict]:
    """All verdicts of a version, sorted by target and then by time. Raises IntegrityError for a damaged one."""
    verdicts = []
    for key in store.list(evidence_prefix("canaries", manifest.model, manifest.version)):
        try:
            found = _read(store.read(key) or b"")
            if canary_key(manifest.model, manifest.version, found.target, found.report) != key:
                raise Malformed("it is not the verdict its name says: it was edited by hand or moved")
        except Malformed as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; delete it, and run the canary again") from error
        verdicts.append(found)
    return sorted(verdicts, key=lambda found: (found.target, found.created_at))


def _read(data: bytes) -> CanaryVerdict:
    document = parse_json(data, MAX_BYTES)
    decode(document, _StoredVerdict, "")
    return decode(document, CanaryVerdict, "")


def verdict_on(target: str, baseline: str, found: Iterable[CanaryVerdict]) -> CanaryVerdict | None:
    """The combined verdict of a target against a baseline (digest of its manifest): a FAIL if any run failed, else a
    PASS if one passed, else the newest; None without a run. target: as in `covers`."""
    mine = [item for item in found if item.baseline == baseline and covers(item.target, target)]
    ranked = sorted(mine, key=lambda item: (("INSUFFICIENT", "PASS", "FAIL").index(item.verdict), item.created_at))
    return ranked[-1] if ranked else None


def covers(ran_on: str, target: str) -> bool:
    """Whether a canary that ran on `ran_on` counts for `target`; for 'cpu', one on any kind of CPU does."""
    return ran_on == target or (target == "cpu" and (ran_on == "cpu" or kind_named(ran_on) is not None))


def canary_target(target: Target) -> str:
    """The canary target of an engine's or a machine's target: the GPU generation, or the kind of CPU."""
    return target.name if target.is_cpu else target.sm


def targets_named(names: Iterable[str]) -> tuple[str, ...]:
    """Canary targets from names: a product gives its generation, a family each of its generations. Sorted.

    Raises UnknownNameError for an unknown name.
    """
    return tuple(sorted({canary_target(item) for name in names for item in parse_targets(name)}))


def list_served(entries: Sequence[EngineEntry], proven_only: bool) -> list[EngineEntry]:
    """The engines that a channel serves. entries: with their current status."""
    return [entry for entry in entries if entry.status == "proven" or (entry.usable and not proven_only)]
