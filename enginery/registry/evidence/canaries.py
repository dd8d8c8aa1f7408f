"""Verdicts of canaries, one for each target that a published version was tried on: a GPU generation, a kind of CPU.

Like latency reports they lie beside the manifest, which never changes for them, and go with the version. Each names the
canary's report, a blob. Several runs on a target are one verdict (`verdict_on`): a FAIL stands.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import InputError, IntegrityError
from enginery.core.hardware.compatibility import hardware_serves
from enginery.core.hardware.cpu_kinds import kind_named
from enginery.core.hardware.targets import parse_targets
from enginery.core.parsing import Malformed
from enginery.core.types import Target
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import canaries_prefix, canary_key

FORMAT = 1
MAX_BYTES = 1 << 16
VERDICTS = ("PASS", "FAIL", "INSUFFICIENT")
# The target of observations that do not say where they were made; it counts for no channel.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class CanaryVerdict:
    """What a canary on one target found. target: 'sm_89', or the kind of CPU.  engine: digest of the candidate's.

    baseline: digest of the manifest it was compared with.  against: its version.  report: digest of the report's blob.
    """

    target: str
    verdict: str
    reason: str
    engine: str
    unit: str
    baseline: str
    against: str
    report: str
    created_at: str

    def to_json(self) -> dict[str, Any]:
        """The document as it is stored."""
        return {"format": FORMAT, **asdict(self)}


def attach_canary(store: Store, manifest: Manifest, found: CanaryVerdict) -> None:
    """Put a verdict beside the version it is about. Does nothing where it is already.

    Raises IntegrityError without its report, InputError for an engine that the version does not have or that does not
    run on the target, and for what could not be read back.
    """
    entry = next((entry for entry in manifest.engines if entry.digest == found.engine), None)
    if entry is None:
        raise InputError(
            f"the canary ran engine {found.engine}, which {manifest.model}@{manifest.version} does not have"
        )
    data = canonical_json(found.to_json())
    try:
        _read(data)
    except Malformed as error:
        raise InputError(f"the canary's report does not say what was compared, and where: {error}") from None
    if found.target != UNKNOWN and not _runs(entry, found.target):
        raise InputError(f"the canary's report is not in order: {entry.unit} does not run on {found.target}")
    if not store.has(found.report):
        raise IntegrityError(f"canary report {found.report} is not in {store.uri}; run the canary again")
    key = canary_key(manifest.model, manifest.version, found.target, found.report)
    store.create(key, data)


def _runs(entry: EngineEntry, target: str) -> bool:
    """Whether an engine may have run on a target of canaries, by what it was built for."""
    here = parse_targets(target)[0].compute_capability if target.startswith("sm_") else None
    return hardware_serves(entry.backend, entry.options, entry.precision, entry.compute_capability, here)


def canaries(store: Store, manifest: Manifest) -> list[CanaryVerdict]:
    """Every verdict of a version, by target, the oldest first. Raises IntegrityError for a damaged one."""
    return sorted(_all(store, manifest), key=lambda found: (found.target, found.created_at))


def _all(store: Store, manifest: Manifest) -> Iterator[CanaryVerdict]:
    for key in store.list(canaries_prefix(manifest.model, manifest.version)):
        try:
            found = _read(store.read(key) or b"")
            if canary_key(manifest.model, manifest.version, found.target, found.report) != key:
                raise Malformed("it is not the verdict its name says: it was edited by hand or moved")
        except Malformed as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; delete it, and run the canary again") from error
        yield found


def _read(data: bytes) -> CanaryVerdict:
    document = parsing.parse_json(data, MAX_BYTES)
    if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
        raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
    return CanaryVerdict(
        target=parsing.field(document, "target", parsing.name),
        verdict=parsing.field(document, "verdict", parsing.one_of(*VERDICTS)),
        reason=parsing.field(document, "reason", parsing.text),
        engine=parsing.field(document, "engine", parsing.digest),
        unit=parsing.field(document, "unit", parsing.text),
        baseline=parsing.field(document, "baseline", parsing.digest),
        against=parsing.field(document, "against", parsing.name),
        report=parsing.field(document, "report", parsing.digest),
        created_at=parsing.field(document, "created_at", parsing.text),
    )


def verdict_on(target: str, baseline: str, found: Iterable[CanaryVerdict]) -> CanaryVerdict | None:
    """The one verdict of a target against a baseline (digest of its manifest): a FAIL if any run failed, else a PASS if
    one passed, else the newest; None where none ran. target: as `covers` takes it."""
    mine = [item for item in found if item.baseline == baseline and covers(item.target, target)]
    ranked = sorted(mine, key=lambda item: (("INSUFFICIENT", "PASS", "FAIL").index(item.verdict), item.created_at))
    return ranked[-1] if ranked else None


def covers(ran_on: str, target: str) -> bool:
    """Whether a canary that ran on `ran_on` speaks for `target`; for 'cpu' it is one on any kind of CPU."""
    return ran_on == target or (target == "cpu" and (ran_on == "cpu" or kind_named(ran_on) is not None))


def canary_target(target: Target) -> str:
    """What a canary's verdict is about, of an engine's target or a machine's: the GPU generation, or the CPU's name."""
    return target.name if target.is_cpu else target.sm


def targets_named(names: Iterable[str]) -> tuple[str, ...]:
    """Targets of canaries by their names; a product stands for its generation, a family for each of its generations.

    Raises UnknownNameError.
    """
    return tuple(sorted({canary_target(item) for name in names for item in parse_targets(name)}))


def served(entries: Sequence[EngineEntry], proven_only: bool) -> list[EngineEntry]:
    """The engines that a channel serves. entries: with their status of today."""
    return [entry for entry in entries if entry.status == "proven" or (entry.usable and not proven_only)]
