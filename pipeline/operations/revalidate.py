"""Proofs of published engines on this machine: what a build had to leave unproven, a machine with the GPU attests.

One engine at a time on a machine, since engines are timed, and two at once would time each other. Of several machines
that want to prove the same engine one does, and the others wait for what it attests.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from builders.backends import discovery
from builders.backends.compatibility import find_incompatibility
from enginesmith.core.digest import digest_of
from enginesmith.core.errors import IntegrityError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.origin import this_process
from enginesmith.core.parsing import parse_json
from enginesmith.core.reports.proof import Report, describe_unmeasured, find_unmeasured
from enginesmith.registry.ensembles import require_model
from enginesmith.registry.evidence.attestations import MAX_BYTES, judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest, make_request, request_of
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.additions import add_attestation, add_latencies
from pipeline.compile.run_context import RunContext, shown_turn
from pipeline.compile.steps.latency import time_engine
from pipeline.compile.steps.proofs import try_to_prove
from pipeline.outcome import make_report
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Graph, GraphVariant, Proof, Unit


@dataclass(frozen=True)
class Attested:
    """One engine's verdict: 'proven', 'failed', or 'unproven' with the reason why it was not run here.

    report, latency: digests of the reports that were attached.
    """

    entry: EngineEntry
    verdict: str
    reason: str
    report: str | None = None
    latency: str | None = None


def entries_of(
    manifest: Manifest, store: Store, targets: Collection[str] | None, engines: Collection[str] | None
) -> Iterator[EngineEntry]:
    """A version's engines as this kind of machine sees them. targets, engines: names and digests; None for all."""
    for known in judge_entries(store, manifest):
        entry = known.on_cpu(this_kind().name)
        wanted = targets is None or entry.target in targets
        if entry.digest is not None and wanted and (engines is None or entry.digest in engines):
            yield entry


def revalidate(
    manifest: Manifest,
    context: RunContext,
    targets: Collection[str] | None = None,
    engines: Collection[str] | None = None,
    again: bool = True,
) -> Iterator[Attested]:
    """Run each engine of a version that can run here, and attach a report to it; say of the others why not.

    targets, engines: names of the targets and digests of the engines to keep to; None for all.  again: whether to run
    an engine that has a verdict by the time when it is its turn.
    Raises IntegrityError when an engine, its graph or its golden set is damaged.
    """
    spec = spec_of(manifest)
    for entry in entries_of(manifest, context.store, targets, engines):
        if reason := why_not_here(entry):
            told = f"{entry.reason}; not run here: {reason}" if entry.status == "proven" else reason
            yield Attested(entry, entry.status, told)
            continue
        if not again and (unknown := why_unmeasured(entry, context.store)):
            yield Attested(entry, "unproven", unknown)
            continue
        turn = f"proving {entry.unit} of {manifest.model}@{manifest.version}"
        machine = digest_of({"proving on": this_process().host})
        engine = digest_of({"proving": entry.digest, "of": manifest.digest})
        # First the machine, then the engine, in every process: the one that has an engine waits for nothing.
        with shown_turn(context, machine, turn), shown_turn(context, engine, turn):
            found = None if again else _read_settled(manifest, entry, context)
            found = found or _prove(manifest, entry, spec, context)
        yield found


def why_not_here(entry: EngineEntry) -> str | None:
    """Why an engine cannot be run here; None when it can.

    A compiler that is not installed, or in a version that does not open the engine, is a reason too: a report of that
    failure would outweigh every machine on which the engine passes.
    """
    backend = discovery.configure(entry.backend, dict(entry.options))
    return backend.runs(entry.hardware) or find_incompatibility(backend, make_request(entry))


def why_unmeasured(entry: EngineEntry, store: Store) -> str:
    """What the golden set of an engine does not measure, so that no run of it proves the engine; '' where nothing."""
    return describe_unmeasured(find_unmeasured(_read_report(entry, store).checks)) if entry.report else ""


def _read_settled(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Attested | None:
    """The verdict that another process attached meanwhile; None where the engine is unproven still."""
    found = next(item for item in judge_entries(context.store, manifest) if item.unit == entry.unit)
    now = found.on_cpu(this_kind().name)
    return None if now.status == "unproven" else Attested(now, now.status, now.reason)


def _prove(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> Attested:
    """Run an engine on the golden set, time it where the spec asks for that, and attach both reports."""
    built = as_built(entry)
    proof = try_to_prove(built, spec, (manifest.golden, manifest.onnx), context, afresh=True)
    report = make_report(built, manifest.golden, [published_proof(entry, context.store), proof], None)
    attached, timed, latency = add_attestation(context.store, manifest, report), None, spec.validation.latency
    if report.verdict == "proven" and latency is not None:
        timed = time_engine(built, spec, latency, manifest.golden, context, afresh=True)
        if timed:
            add_latencies(context.store, manifest, [timed])
    return Attested(entry, report.verdict, report.reason, attached, timed)


def spec_of(manifest: Manifest) -> ModelSpec:
    """The spec that a version was built from. Raises IntegrityError for one that this installation cannot read,
    InputError for an ensemble."""
    require_model(manifest)
    try:
        return ModelSpec.model_validate(manifest.spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise IntegrityError(
            f"{manifest.model}@{manifest.version}: its spec does not fit this installation: {where}: {first['msg']}; "
            "install the backends that it was built with, and the same enginesmith"
        ) from error


def as_built(entry: EngineEntry) -> Built:
    """The value that the build step gave for an entry. Raises IntegrityError where it does not give its build key."""
    request = request_of(entry)
    graph = Graph(GraphVariant(request.precision), request.model, request.inputs, request.outputs, entry.scales)
    unit = Unit(request, graph, "cached", "published")
    return Built(unit, entry.digest, entry.size_bytes or 0, entry.suffix or "", entry.requires, entry.notes)


def published_proof(entry: EngineEntry, store: Store) -> Proof:
    """The export and quantization stages as they were measured when the version was published, with the task metrics of
    the exported model and of the graph."""
    if entry.report is None:
        return Proof()
    report = _read_report(entry, store)
    before = ("export", "quantization")
    spreads = tuple(spread for spread in report.spreads if spread.joint in before)
    checks = [
        check
        for check in report.checks
        if check.joint in before or (check.joint == "task" and not check.case.endswith(", engine"))
    ]
    return Proof(tuple(checks), spreads=spreads)


def _read_report(entry: EngineEntry, store: Store) -> Report:
    return Report.from_json(parse_json(store.read_blob(str(entry.report)), MAX_BYTES))
