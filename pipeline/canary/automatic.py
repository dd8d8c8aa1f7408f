"""Canaries that a flow starts: a published version against what a channel serves, on the hardware of this machine.

Where there is nothing to compare (nothing served yet, no recorded traffic, no engine for this machine) the outcome is a
reason, not an error.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import Reference, check_channel, check_model, check_version
from enginesmith.core.types import Target
from enginesmith.registry.evidence.canaries import canaries, canary_target, verdict_on
from enginesmith.registry.store.base import Store, written_at
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.versions import channel_state, lookup
from enginesmith.registry.versions.channel_state import read_history
from pipeline.canary.engines import check_shared_gpu, choose, choose_unrun
from pipeline.canary.run import CanaryRun, run_canary
from pipeline.canary.settle import attach
from pipeline.intake.registration import place_at
from validation.canary.replay import ReplayPace
from validation.canary.report import CanaryReport

SUFFIXES = (".jsonl", ".npz")


@dataclass(frozen=True)
class CanaryRequest:
    """A published version, the channel whose version it would replace, and the recorded traffic to replay.

    traffic: a folder or bucket's prefix with MODEL.jsonl or MODEL.npz, and MODEL.observed.jsonl where a log
    shows how many requests were in flight.  target: as `--target`.  scale: factor on the recorded request rate.
    duration: seconds; None replays the traffic once.
    """

    model: str
    version: str
    channel: str = "stable"
    traffic: str | None = None
    target: str = "auto"
    scale: float = 1.0
    duration: float | None = None


@dataclass(frozen=True)
class CanaryOutcome:
    """A report with the digest of its blob, and its reason; without a report, the reason why there was no canary."""

    reason: str
    report: CanaryReport | None = None
    blob: str | None = None


def sides_of(store: Store, request: CanaryRequest) -> tuple[Reference, Reference] | str:
    """Candidate and baseline, or why there is nothing to compare. The target's hardware is not needed for this.

    Raises UnknownNameError for a version that is not there, UntrustedError, UnavailableError.
    """
    model, channel = check_model(request.model), check_channel(request.channel)
    candidate = lookup.load(store, model, check_version(request.version))
    incumbent = channel_state.read_channel(store, model, channel)
    if incumbent is None:
        return f"{model}:{channel} serves nothing yet; there is nothing to compare with"
    if incumbent.manifest == candidate.digest:
        return f"{model}:{channel} serves {candidate.version} already"
    if request.traffic is None:
        return "no recorded traffic is named; `enginesmith prefect deploy --traffic LOCATION` names it"
    references = Reference(model, version=candidate.version), Reference(model, version=incumbent.version)
    target = target_named(request.target)
    try:
        for reference in references:
            choose_unrun(store, reference, target, None)
    except InputError as error:
        return f"there is nothing to run on {target.name}: {str(error).partition(';')[0]}"
    with place_at(request.traffic) as traffic_place:
        if not any(traffic_place.has(f"{model}{suffix}") for suffix in SUFFIXES):
            return f"{request.traffic} has no traffic of {model} ({model}.jsonl or {model}.npz)"
    return references


def missed_version(store: Store, model: str, channel: str, target: Target, grace: timedelta) -> str | None:
    """The newest version of a model if a canary of it on this target was lost; None where none is due.

    One is due for a version that was published longer than `grace` ago, by the store's clock, and that the channel
    never served, where there is no verdict of it against what the channel serves now. Raises IntegrityError for
    a damaged registry.
    """
    live_channel = channel_state.read_channel(store, check_model(model), check_channel(channel))
    versions = lookup.versions(store, model)
    if live_channel is None or not versions:
        return None
    newest_manifest = lookup.load(store, model, versions[-1])
    if any(move.manifest == newest_manifest.digest for move in read_history(store, live_channel).moves):
        return None
    if verdict_on(canary_target(target), live_channel.manifest, canaries(store, newest_manifest)):
        return None
    published_at = written_at(store, manifest_key(model, newest_manifest.version))
    return newest_manifest.version if published_at and published_at < store.now() - grace else None


def canary(store: Store, request: CanaryRequest, say: Callable[[str], None]) -> CanaryOutcome:
    """Replay the model's recorded traffic against both versions, judge, and attach the verdict to the version.

    Raises UnknownNameError for a version that is not there, DataError for traffic that does not fit, UnavailableError.
    """
    references, target = sides_of(store, request), target_named(request.target)
    if isinstance(references, str):
        return CanaryOutcome(references)
    try:
        check_shared_gpu(target)
        for reference in references:
            choose(store, reference, target, None)
    except InputError as error:
        return CanaryOutcome(f"it cannot run here: {error}")
    with (
        place_at(str(request.traffic)) as traffic_place,
        tempfile.TemporaryDirectory(prefix="enginesmith-canary-") as folder,
    ):
        traffic_place.refresh()
        traffic_paths = [traffic_place.folder / f"{request.model}{suffix}" for suffix in SUFFIXES]
        traffic = next((path for path in traffic_paths if path.is_file()), None)
        if traffic is None:
            return CanaryOutcome(f"{request.traffic} has no traffic of {request.model} any more")
        observed_path = traffic_place.folder / f"{request.model}.observed.jsonl"
        pace = ReplayPace(request.scale, request.duration, in_flight=None)
        log_path = observed_path if observed_path.is_file() else None
        canary_run = CanaryRun(*references, target, traffic, Path(folder) / "canary", pace=pace, observed=log_path)
        report = run_canary(store, canary_run, say).report
        digest = store.put_bytes(report.to_bytes())
        attach(store, report, digest)
    return CanaryOutcome(report.reason, report, digest)
