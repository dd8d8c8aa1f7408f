"""Makes a version with other weights: a published engine's kernels, without a build (`enginesmith debug refit`)."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from builders.backends import discovery
from builders.backends.optional_methods import Refitting, get_scheme
from builders.execution.jobs import Job, Needs, WorkerContext
from builders.execution.process import enter_phase
from enginesmith.core.errors import EnginesmithError, InputError, ModelError, canonical_json, digest_of
from enginesmith.core.hardware.cpu_kinds import why_no_proof
from enginesmith.core.parsing import user
from enginesmith.core.reports.proof import Approved, approve
from enginesmith.core.requirements import Weights
from enginesmith.core.text import now
from enginesmith.core.types import QUANTIZED, BuildRequest
from enginesmith.registry.evidence.canaries import LAYERS
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.publish import Published, publish
from pipeline.compile.causes import explain_change
from pipeline.compile.publication.pages import SBOM, STATEMENT, with_provenance
from pipeline.compile.publication.publish import REFITTED
from pipeline.compile.run_context import RunContext, Work, fail_step
from pipeline.compile.steps.blobs import fetch_engine, fetch_graph
from pipeline.compile.steps.engines import memory_request, needs, recall_engine, record_engine
from pipeline.compile.steps.keys import engine_limits
from pipeline.compile.steps.proofs import engine_check, prove_engine
from pipeline.operations.validate import published_proof, read_report, spec_of
from pipeline.outcome import JudgedUnit, Outcome, engine_of, judge_built
from pipeline.progress.events import Finished
from pipeline.values import Built, EngineBlob, Graph, GraphVariant, Recorded, Unit

# The weights come from a spec or from another version. A unit is refitted when the engine of the same unit was built
# for it (its manifest says so), everything else of its build request is the same, and the two ONNX models differ in
# their weights alone. The new engine is put on record under its build key as if it had been built, so that what follows
# a build follows here too: it is proven where its hardware is, else published as unproven. The new version's provenance
# names the engine that the kernels are from.


@dataclass(frozen=True)
class RefitEngine:
    """Make the engine of `request` from another one in a process of its own, and put it on record as if it was built.

    before: the other engine.  origin: the version that has it, for the notes.
    """

    before: EngineBlob
    request: BuildRequest
    origin: str

    def run(self, context: WorkerContext) -> Recorded:
        """The new engine's record.

        Raises ModelError when the models differ in more than their weights, InputError for a backend that cannot refit.
        """
        from builders.onnx_graphs.structure import differs

        store, workdir = open_store(context.store), context.workdir
        old_engine, request = self.before, self.request
        backend = discovery.configure(request.backend, dict(request.options))
        discovery.check_toolchain(backend, request)
        if not isinstance(backend, Refitting):
            raise InputError(f"engines of {request.backend} cannot be refitted")
        enter_phase("fetching")
        model = fetch_graph(store, request.model, workdir / "new.onnx")
        if reason := differs(fetch_graph(store, old_engine.request.model, workdir / "old.onnx"), model):
            raise ModelError(f"the models differ in more than their weights: {reason}; build the engine again")
        enter_phase("refitting")
        started_s = time.monotonic()
        new_engine = backend.refit(fetch_engine(store, old_engine, workdir), model, request, workdir)
        seconds = round(time.monotonic() - started_s, 3)
        enter_phase("storing")
        is_stripped = any(isinstance(requirement, Weights) for requirement in new_engine.requires)
        weights_text = "weights left to the ONNX model" if is_stripped else "weights replaced"
        note = f"refitted from {self.origin}, engine {old_engine.digest[:12]}: {weights_text}, kernels kept"
        engine = replace(new_engine, request=request, notes=(*new_engine.notes, note))
        return record_engine(store, engine, seconds, {}, refitted_from=old_engine.digest)


@dataclass(frozen=True)
class Refit:
    """Result of a unit's refit. kernels: digest of the engine that they are from, None without one.

    engine: digest of the new engine, None where there is none, and then `reason` says why.
    """

    request: BuildRequest
    kernels: str | None = None
    engine: str | None = None
    reason: str = ""

    def to_json(self) -> dict[str, str | None]:
        """A row of `enginesmith debug refit --json`."""
        return {"unit": self.request.unit, "kernels": self.kernels, "engine": self.engine, "reason": self.reason}


@dataclass(frozen=True)
class PublishedRefit:
    """The version that the refitted engines are in; None where none was fit. failed: names of units."""

    model: str
    version: str | None
    channel_refusal: str | None
    failed: tuple[str, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> "PublishedRefit":
        """The version that a run of all steps published."""
        failed_units = tuple(engine.entry.unit for engine in outcome.failed)
        return cls(outcome.model, outcome.version, outcome.channel_refusal, failed_units)


def refit_units(requests: Iterable[BuildRequest], base: Manifest, work: Work) -> list[Refit]:
    """Refit the engines of `base` for these requests with new weights; of the others say why not. Builds nothing.

    Raises UnavailableError and IntegrityError, which say nothing about an engine, and StepError when cancelled.
    """
    entries = {entry.unit: entry for entry in base.engines}
    refits = foresee_refits(requests, base)
    return [refit if refit.reason else _refit(refit, entries[refit.request.unit], base, work) for refit in refits]


def foresee_refits(requests: Iterable[BuildRequest], base: Manifest) -> list[Refit]:
    """The units that `refit_units` would try to refit according to the manifest, and the reasons against the others;
    nothing is run."""
    entries, refits = {entry.unit: entry for entry in base.engines if entry.usable}, []
    for request in requests:
        entry = entries.get(request.unit)
        refits.append(Refit(request, entry.digest if entry else None, reason=cannot(request, entry, base) or ""))
    return refits


def cannot(request: BuildRequest, entry: EngineEntry | None, base: Manifest) -> str | None:
    """The reason in the manifest why the engine of `entry` cannot get the weights of `request`."""
    if entry is None:
        return f"{base.reference} has no engine for it"
    backend = discovery.configure(request.backend, dict(request.options))
    if not isinstance(backend, Refitting):
        return f"{request.backend} does not refit"
    old_request = request_of(entry)
    if reason := backend.refits(old_request):
        return f"{entry.unit} of {base.reference} cannot be refitted: {reason}"
    if old_request.model == request.model:
        return "its weights are the same"
    new_request = replace(old_request, model=request.model)
    return None if new_request == request else f"more than weights changed: {explain_change(new_request, request)}"


def _refit(planned_refit: Refit, entry: EngineEntry, base: Manifest, work: Work) -> Refit:
    context = work.context
    request = planned_refit.request
    if recall_engine(request, context):
        return replace(planned_refit, reason="an engine with this build key is in the registry")
    backend = discovery.configure(request.backend, dict(request.options))
    needs_gpu = isinstance(backend, Refitting) and backend.refit_needs_gpu()
    old_engine = engine_of(entry)
    refit_request, name = RefitEngine(old_engine, request, base.reference), f"refit {request.unit}"
    job_needs = needs(request, memory_request(work.spec)) if needs_gpu else Needs()
    job = Job(name, refit_request, context.store.uri, engine_limits(work.spec, "build"), job_needs)
    try:
        record = context.run_job(context.executor if needs_gpu else context.local, name, job)
    except EnginesmithError as error:
        fail_step(name, error, context)
        return replace(planned_refit, reason=str(error))
    context.progress.emit(Finished(name, "refitted", words=f"refitted in {record.seconds:.1f} s"))
    return replace(planned_refit, engine=record.digest)


# Refitting with the weights of another version: a new version like that one, with the refitted engines of the first.
#
# The other version's measurements stay; the refitted engines are added to its own, or replace them. The drift of each
# graph from the framework was measured when that version was built. The drift of an engine from its graph is measured
# now if this machine has the engine's hardware; otherwise the engine is published as unproven.


@dataclass(frozen=True)
class WantedRefit:
    """An engine to make: the build request of the first version, with the graph of `donor` from the other version."""

    request: BuildRequest
    donor: EngineEntry


def wanted_of(base: Manifest, source: Manifest) -> tuple[list[WantedRefit], list[Refit]]:
    """The engines of `base` to refit, and those for which the other version has no graph, with the reason."""
    refit_items, refused_refits = [], []
    for entry in filter(lambda peer: peer.usable, base.engines):
        # The entry of the other version whose graph fits this engine's precision and backend and that has a report;
        # one of the same unit first.
        reports = {peer.graph: peer.report for peer in source.engines if peer.report}
        donors = [peer for peer in source.engines if peer.graph in reports and _is_same_variant(peer, entry)]
        best_donor = next((peer for peer in donors if peer.unit == entry.unit), donors[0] if donors else None)
        old_request, donor = request_of(entry), best_donor and replace(best_donor, report=reports[best_donor.graph])
        if donor is None:
            reason = f"{source.reference} has no {entry.precision} graph with a report for {entry.backend}; build one"
            refused_refits.append(Refit(old_request, entry.digest, reason=reason))
            continue
        changes = {"model": donor.graph, "inputs": donor.inputs, "outputs": donor.outputs}
        refit_items.append(WantedRefit(replace(old_request, **changes), donor))  # type: ignore[arg-type]
    return refit_items, refused_refits


def publish_refitted(base: Manifest, other: Manifest, items: Sequence[WantedRefit], context: RunContext) -> Published:
    """Prove what can be proven here, and publish the other version again with the refitted engines, for the channel
    candidate.

    base, other: the version that the kernels are from, and the one with the new weights.  context: of the run.
    Raises as `enginesmith.registry.versions.publish.publish`.
    """
    new_engines, failed_entries = list[RenewedEngine](), list[EngineEntry]()
    for wanted_refit in items:
        unit = _judge(wanted_refit, other, context)
        if unit.report and unit.built.record and (proof := approve(unit.report)):
            context.store.put_bytes(canonical_json(proof.report.to_json()))
            new_engines.append(RenewedEngine(unit.entry, proof, unit.built.record))
        else:
            failed_entries.append(unit.entry)
    reason = f"refitted from {base.reference}, weights of {other.reference}"
    return publish_again(other, new_engines, failed_entries, "refitted", context, why=reason, channel="candidate")


@dataclass(frozen=True)
class RenewedEngine:
    """A unit of a version with another engine, its approval and its record; an ensemble's has none."""

    entry: EngineEntry
    approved: Approved
    record: Recorded | None


def publish_again(
    base: Manifest,
    new_engines: Sequence[RenewedEngine],
    failed_entries: Sequence[EngineEntry],
    word: str,
    context: RunContext,
    *,
    why: str,
    channel: str | None = None,
) -> Published:
    """Publish a version again with other engines in the place of some. word: what was done to these.

    failed_entries: units without one.  channel: the one to move to the new version.
    Raises as `publish`.
    """
    new_entries = [*(engine.entry for engine in new_engines), *failed_entries]
    units = {entry.unit: entry.digest if base.graphs else entry.build_key for entry in new_entries}
    approvals, other_entries = _keep(base, set(units), context)
    approvals += [(engine.entry, engine.approved) for engine in new_engines]
    positions = {entry.unit: position for position, entry in enumerate(base.engines)}
    approvals.sort(key=lambda pair: positions.get(pair[0].unit, len(positions)))
    dropped_names = {STATEMENT, SBOM, *(f"{LAYERS} {unit}" for unit in units)}
    records = [engine.record for engine in new_engines if engine.record]
    origins = {f"{REFITTED} {engine.entry.unit}": engine.record for engine in new_engines}
    kernels = {name: record.refitted_from for name, record in origins.items() if record and record.refitted_from}
    manifest = replace(
        base,
        version="",
        engines=(),
        report=None,
        created_at=now(),
        content=digest_of({"content": base.content, word: sorted(units.items())}),
        sources={name: digest for name, digest in base.sources.items() if name not in dropped_names},
        provenance={**base.provenance, **kernels},
        shards={**base.shards, **{record.digest: dict(record.shards) for record in records if record.shards}},
    )
    manifest = with_provenance(context.store, manifest, [entry for entry, _ in approvals], context.started_at)
    manifest = manifest.with_blake3({record.digest: record.blake3 for record in records})
    return publish(
        context.store, manifest, approvals, [*other_entries, *failed_entries], channel=channel, by=user(), why=why
    )


def _is_same_variant(engine: EngineEntry, peer: EngineEntry) -> bool:
    """Whether two entries have the same kind of graph: that of a float precision is the same for every backend, that of
    a quantized one is written in the backend's scheme."""
    if engine.precision != peer.precision or engine.precision not in QUANTIZED or engine.backend == peer.backend:
        return engine.precision == peer.precision
    one_scheme, other_scheme = (get_scheme(discovery.load(entry.backend)(), entry.hardware) for entry in (engine, peer))
    return one_scheme == other_scheme


def _judge(wanted_refit: WantedRefit, source: Manifest, context: RunContext) -> JudgedUnit:
    request = wanted_refit.request
    graph = Graph(
        GraphVariant(request.precision), request.model, request.inputs, request.outputs, wanted_refit.donor.scales
    )
    build = Built(Unit(request, graph, "cached", "refitted"), recall_engine(request, context))
    backend = discovery.configure(request.backend, dict(request.options))
    run_problem = backend.runs(request.target) or why_no_proof(request)
    proofs = [published_proof(wanted_refit.donor, context.store)]
    if not run_problem:
        work = Work(spec_of(source), context)
        proofs.append(prove_engine(engine_check(build.blob, work.spec, source.golden), work))
    return judge_built(build, source.golden, proofs, run_problem)


def _keep(
    source: Manifest, replaced_units: set[str], context: RunContext
) -> tuple[list[tuple[EngineEntry, Approved]], list[EngineEntry]]:
    """The other version's own entries that stay: engines with their approval, and the other units."""
    approvals, unproven_entries = [], []
    for entry in source.engines:
        if entry.unit in replaced_units:
            continue
        proof = None
        if entry.usable and entry.report:
            proof = approve(read_report(entry.report, context.store))
        if proof is None:
            unproven_entries.append(entry)
        else:
            approvals.append((entry, proof))
    return approvals, unproven_entries
