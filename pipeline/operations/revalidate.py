"""Proves published engines on this machine: what a CPU host had to leave unproven, a node with the GPU attests.

One at a time on a machine, since engines are timed, and two at once would time each other; and of several machines that
want to prove the same engine one does, while the others wait for what it attests.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from builders.backends import discovery
from builders.backends.compatibility import find_incompatibility
from enginery.core.digest import digest_of
from enginery.core.errors import IntegrityError
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.origin.presence import this_process
from enginery.core.parsing import parse_json
from enginery.core.reports.proof import Report
from enginery.registry.build_request import make_request, request_of
from enginery.registry.evidence.attestations import MAX_BYTES, attest, judge_entries
from enginery.registry.evidence.latencies import attach_latency
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.latency import time_engine
from pipeline.compile.steps.proofs import try_to_prove
from pipeline.compile.verdict import make_report
from pipeline.compile.waiting import shown_turn
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Graph, GraphVariant, Proof, Unit


@dataclass(frozen=True)
class Attested:
    """One engine's result: 'proven', 'failed', or 'unproven' with the reason why it was not run here.

    report, latency: digests of the reports that were attached.
    """

    entry: EngineEntry
    verdict: str
    reason: str
    report: str | None = None
    latency: str | None = None


def revalidate(
    manifest: Manifest,
    context: RunContext,
    targets: Collection[str] | None = None,
    engines: Collection[str] | None = None,
    again: bool = True,
) -> Iterator[Attested]:
    """Run every engine of a version that can run here, and attach a report to each; say of the others why not.

    targets, engines: names of the targets and digests of the engines to keep to; None for all.  again: whether to run
    what has been proven, or has failed, by the time when it is its turn.
    Raises IntegrityError when an engine, its graph or its golden set is damaged.
    """
    spec = spec_of(manifest)
    for known in judge_entries(context.store, manifest):
        entry = known.on_cpu(this_kind().name)
        if entry.digest is None or (targets is not None and entry.target not in targets):
            continue
        if engines is not None and entry.digest not in engines:
            continue
        if reason := why_not_here(entry):
            told = f"{entry.reason}; not run here: {reason}" if entry.status == "proven" else reason
            yield Attested(entry, entry.status, told)
            continue
        with _its_turn(manifest, entry, context):
            found = None if again else _read_settled(manifest, entry, context)
            found = found or _read_attested(manifest, entry, spec, context)
        yield found


def why_not_here(entry: EngineEntry) -> str | None:
    """Why an engine cannot be run here; None when it can.

    Where its compiler is not installed, or in a version that does not open it, that says nothing about the engine: a
    report of it would outweigh every machine on which it passes.
    """
    backend = discovery.configure(entry.backend, dict(entry.options))
    return backend.runs(entry.hardware) or find_incompatibility(backend, make_request(entry))


@contextmanager
def _its_turn(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Iterator[None]:
    """First the machine, then the engine, by everybody: who has an engine waits for nothing."""
    host = this_process().host
    what = f"proving {entry.unit} of {manifest.model}@{manifest.version}"
    with (
        shown_turn(context, digest_of({"proving on": host}), what),
        shown_turn(context, digest_of({"proving": entry.digest, "of": manifest.digest}), what),
    ):
        yield


def _read_settled(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Attested | None:
    """What somebody else found out meanwhile."""
    found = next(item for item in judge_entries(context.store, manifest) if item.unit == entry.unit)
    now = found.on_cpu(this_kind().name)
    return None if now.status == "unproven" else Attested(now, now.status, now.reason)


def _read_attested(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> Attested:
    report = _prove(manifest, entry, spec, context)
    attached = attest(context.store, manifest, report)
    timed = _time(manifest, entry, spec, context) if report.verdict == "proven" else None
    return Attested(entry, report.verdict, report.reason, attached, timed)


def spec_of(manifest: Manifest) -> ModelSpec:
    """The spec that a version was built from: its limits and its metric count here too."""
    try:
        return ModelSpec.model_validate(manifest.spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise IntegrityError(
            f"{manifest.model}@{manifest.version}: its spec does not fit this installation: {where}: {first['msg']}; "
            "install the backends that it was built with, and the same enginery"
        ) from error


def _prove(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> Report:
    built = as_built(entry)
    golden = manifest.golden
    proof = try_to_prove(built, spec, golden, context, afresh=True)
    return make_report(built, golden, [published_proof(entry, context.store), proof], None)


def _time(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> str | None:
    """Time the engine on this kind of machine, where the spec asks for it, and attach the report."""
    asked = spec.validation.latency
    if asked is None:
        return None
    found = time_engine(as_built(entry), spec, asked, manifest.golden, context, afresh=True)
    if found:
        attach_latency(context.store, manifest, found)
    return found


def as_built(entry: EngineEntry) -> Built:
    """The unit as it was when it was built. Raises IntegrityError when the entry does not give its own build key."""
    request = request_of(entry)
    graph = Graph(GraphVariant(request.precision), request.model, request.inputs, request.outputs, entry.scales)
    unit = Unit(request, graph, "cached", "published")
    return Built(unit, entry.digest, entry.size_bytes or 0, entry.suffix or "", entry.requires, entry.notes)


def published_proof(entry: EngineEntry, store: Store) -> Proof:
    """The export and quantization stages as they were measured when the version was published."""
    if entry.report is None:
        return Proof()
    report = Report.from_json(parse_json(store.read_blob(entry.report), MAX_BYTES))
    before = ("export", "quantization")
    spreads = tuple(spread for spread in report.spreads if spread.joint in before)
    return Proof(tuple(check for check in report.checks if check.joint in before), spreads=spreads)
