"""Validates engines of a published version on this machine."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from builders.backends import discovery
from builders.backends.discovery import find_incompatibility
from builders.execution.local import workdir
from enginesmith.core.codec import decode
from enginesmith.core.errors import EnginesmithError, IntegrityError, digest_of
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import check_model, check_version, version_order
from enginesmith.core.parsing import parse_json, this_process
from enginesmith.core.reports.proof import PASSED, Report, describe_unmeasured, find_unmeasured
from enginesmith.core.requirements import Json
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import MAX_BYTES, judge_entries
from enginesmith.registry.manifest import (
    USABLE,
    EngineEntry,
    Manifest,
    functions_of,
    load_pinned,
    make_request,
    pinned_engines,
    require_model,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import channel_state, lookup
from enginesmith.registry.versions.publish import add_attestation, add_latencies
from pipeline.compile.ensembles.assembly import read_data
from pipeline.compile.ensembles.proof import ProveEnsemble, blame, prove
from pipeline.compile.ensembles.publication import GOLDEN, BuiltEnsemble, EnsembleUnit
from pipeline.compile.ensembles.whole import ChainedGraph
from pipeline.compile.run_context import RunContext, Work, hold_lock
from pipeline.compile.steps.keys import time_engine
from pipeline.compile.steps.proofs import CheckEngine, engine_check, prove_engine
from pipeline.outcome import engine_of, make_report
from pipeline.spec.ensembles.model import EnsembleSpec, LoadedEnsemble
from pipeline.spec.model import ModelSpec
from pipeline.values import Proof

# Proofs of published engines on this machine: what a build had to leave unproven, a machine with the GPU attests.
#
# One engine at a time on a machine, since engines are timed, and two at once would time each other. Of several machines
# that want to prove the same engine one does, and the others wait for what it attests. An engine of an ensemble is
# proven from end to end, once those of its graphs are.


@dataclass(frozen=True)
class Validated:
    """The verdict on one engine: 'proven', 'failed', or 'unproven' with the reason why it was not run; 'refused' for
    recorded answers that cannot be of this engine, 'error' where the version could not be tried.

    reference: 'digits@4'.  unit: None where it is about the whole version.
    checks, sqnr_db: as of an entry.  report, latency: digests of the reports that were attached.
    """

    reference: str
    unit: str | None
    verdict: str
    reason: str
    checks: Mapping[str, int] = field(default_factory=dict)
    sqnr_db: float | None = None
    report: str | None = None
    latency: str | None = None

    @classmethod
    def of(cls, manifest: Manifest, entry: EngineEntry, verdict: str = "", reason: str | None = None) -> "Validated":
        """A verdict on a version's engine. Defaults: those in the manifest."""
        reason = entry.reason if reason is None else reason
        verdict = verdict or entry.status
        return cls(manifest.reference, entry.unit, verdict, reason, entry.checks, entry.sqnr_db)

    @property
    def good(self) -> bool:
        """Whether the engine may be used."""
        return self.verdict in USABLE


def entries_of(
    manifest: Manifest, store: Store, targets: Collection[str] | None, engines: Collection[str] | None
) -> Iterator[EngineEntry]:
    """A version's engines as this kind of machine sees them. targets, engines: names and digests; None for all."""
    for judged_entry in judge_entries(store, manifest):
        entry = judged_entry.on_cpu(this_kind().name)
        is_selected = targets is None or entry.target in targets
        if entry.digest is not None and is_selected and (engines is None or entry.digest in engines):
            yield entry


def validate(
    manifest: Manifest,
    context: RunContext,
    targets: Collection[str] | None = None,
    engines: Collection[str] | None = None,
    again: bool = True,
) -> Iterator[Validated]:
    """Run each engine of a version that can run here, and attach a report to it; say of the others why not.

    targets, engines: names of the targets and digests of the engines to keep to; None for all.  again: whether to run
    an engine that has a verdict by the time when it is its turn.
    Of an ensemble an engine is run from end to end, once those of its graphs are proven here; the reports on these are
    attached to their versions.

    Raises IntegrityError when an engine, its graph or its golden set is damaged.
    """
    with open_version(manifest, context.store) as version:
        for entry in entries_of(manifest, context.store, targets, engines):
            yield version.validate(entry, context, again)


@contextmanager
def open_version(manifest: Manifest, store: Store) -> Iterator["PublishedModel | PublishedEnsemble"]:
    """A version with the data that proves its engines. Raises IntegrityError for a spec that this installation cannot
    read."""
    if not manifest.graphs:
        yield PublishedModel(manifest, spec_of(manifest))
        return
    with workdir() as folder:
        yield PublishedEnsemble(manifest, read_ensemble(manifest, store, folder))


@dataclass(frozen=True)
class PublishedModel:
    """A version of a model. spec: that it was built from."""

    manifest: Manifest
    spec: ModelSpec

    def validate(self, entry: EngineEntry, context: RunContext, again: bool) -> Validated:
        """The verdict on an engine, run here where it can be. again: as of `validate`."""
        manifest = self.manifest
        if reason := why_not_here(entry):
            stored_reason = f"{entry.reason}; not run here: {reason}" if entry.status in PASSED else reason
            return Validated.of(manifest, entry, reason=stored_reason)
        if not again and (unmeasured_reason := why_unmeasured(entry, context.store)):
            return Validated.of(manifest, entry, "unproven", unmeasured_reason)
        task_text = f"proving {entry.unit} of {manifest.reference}"
        machine_lock = digest_of({"proving on": this_process().host})
        engine_lock = digest_of({"proving": entry.digest, "of": manifest.digest})
        # Every process locks first the machine, then the engine, so that they cannot deadlock.
        with hold_lock(context, machine_lock, task_text), hold_lock(context, engine_lock, task_text):
            if not again:  # another process may have attached a verdict meanwhile
                judged_entry = next(peer for peer in judge_entries(context.store, manifest) if peer.unit == entry.unit)
                if (current_entry := judged_entry.on_cpu(this_kind().name)).status != "unproven":
                    return Validated.of(manifest, current_entry)
            return self._prove(entry, context)

    def _prove(self, entry: EngineEntry, context: RunContext) -> Validated:
        """Run an engine on the golden set, time it where the spec asks for that, and attach both reports."""
        work, manifest = Work(self.spec, context), self.manifest
        report = self.judge(entry, prove_engine(self.check(entry), work, afresh=True), context.store)
        verdict = attach(context.store, manifest, report)
        terms = self.spec.validation.latency
        if report.verdict not in PASSED or terms is None:
            return verdict
        report_digest = time_engine(engine_of(entry), terms, manifest.golden, work, afresh=True)
        if report_digest:
            add_latencies(context.store, manifest, [report_digest])
        return replace(verdict, latency=report_digest)

    def check(self, entry: EngineEntry) -> CheckEngine:
        """What proves an engine."""
        return engine_check(engine_of(entry), self.spec, self.manifest.golden)

    def judge(self, entry: EngineEntry, proof: Proof, store: Store, cpu: str | None = None) -> Report:
        """The report on an engine with its proof. cpu: as of `make_report`.  entry: of the engine.  store: its
        registry."""
        return make_report(entry, self.manifest.golden, [published_proof(entry, store), proof], cpu=cpu)


@dataclass(frozen=True)
class PublishedEnsemble:
    """A version of an ensemble. built: what it was published from."""

    manifest: Manifest
    built: BuiltEnsemble

    def validate(self, entry: EngineEntry, context: RunContext, again: bool) -> Validated:
        """The verdict on an engine, run here where it can be, after those of its graphs. again: as of `validate`."""
        if not again and entry.status != "unproven":
            return Validated.of(self.manifest, entry)
        if reason := ensemble_not_here(context.store, self.manifest, entry):
            return Validated.of(self.manifest, entry, reason=reason)
        for graph, pinned_manifest, engine in pinned_engines(context.store, self.manifest, entry):
            for verdict in validate(pinned_manifest, context, [engine.target], [str(engine.digest)], again=False):
                if verdict.unit == engine.unit and verdict.verdict not in PASSED:
                    return Validated.of(
                        self.manifest, entry, verdict.verdict, f"graph {graph.name!r}: {verdict.reason}"
                    )
        proof = prove(self.check(entry, context.store), entry.unit, context, afresh=True)
        return attach(context.store, self.manifest, self.judge(entry, proof))

    def check(self, entry: EngineEntry, store: Store) -> ProveEnsemble:
        """What proves an engine."""
        engines = {graph.name: engine for graph, _, engine in pinned_engines(store, self.manifest, entry)}
        return self.built.request_proof(EnsembleUnit.of(entry, engines))

    def judge(self, entry: EngineEntry, proof: Proof, cpu: str | None = None) -> Report:
        """The report on an engine with its proof. cpu: as of `make_report`."""
        return make_report(entry, self.built.golden.digest, [proof], cpu=cpu, remarks=blame(proof.checks))


def attach(store: Store, manifest: Manifest, report: Report) -> Validated:
    """Attach a report to a version."""
    digest = add_attestation(store, manifest, report)
    figures = report.counts, report.sqnr_db
    return Validated(manifest.reference, report.unit, report.verdict, report.reason, *figures, report=digest)


def why_not_here(entry: EngineEntry) -> str | None:
    """Why an engine cannot be run here; None when it can.

    A compiler that is not installed, or in a version that does not open the engine, is a reason too: a report of that
    failure would outweigh every machine on which the engine passes.
    """
    backend = discovery.configure(entry.backend, dict(entry.options))
    return backend.runs(entry.hardware) or find_incompatibility(backend, make_request(entry))


def why_unmeasured(entry: EngineEntry, store: Store) -> str:
    """The part of an engine that its golden set does not measure, so that no run proves it; '' if it measures all."""
    return describe_unmeasured(find_unmeasured(read_report(str(entry.report), store).checks)) if entry.report else ""


def spec_of(manifest: Manifest) -> ModelSpec:
    """The spec that a version was built from. Raises IntegrityError for one that this installation cannot read,
    InputError for an ensemble."""
    require_model(manifest)
    try:
        return ModelSpec.model_validate(manifest.spec)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        location = ".".join(map(str, first_error["loc"])) or "spec"
        raise IntegrityError(
            f"{manifest.reference}: its spec does not fit this installation: {location}: "
            f"{first_error['msg']}; install the backends that it was built with, and the same enginesmith"
        ) from error


def published_proof(entry: EngineEntry, store: Store) -> Proof:
    """The export and quantization stages as they were measured when the version was published, with the task metrics of
    the exported model and of the graph."""
    if entry.report is None:
        return Proof()
    report = read_report(str(entry.report), store)
    early_stages = ("export", "quantization")
    spreads = tuple(spread for spread in report.spreads if spread.stage in early_stages)
    checks = [
        check
        for check in report.checks
        if check.stage in early_stages or (check.stage == "task" and not check.case.endswith(", engine"))
    ]
    return Proof(tuple(checks), spreads=spreads)


def read_report(digest: str, store: Store) -> Report:
    """The report in a blob. Raises IntegrityError."""
    return Report.from_json(parse_json(store.read_blob(digest), MAX_BYTES))


def ensemble_not_here(store: Store, manifest: Manifest, entry: EngineEntry) -> str | None:
    """Why an engine of an ensemble cannot be run here: the reason of one of its graphs' engines; None if it can."""
    for graph, _, engine in pinned_engines(store, manifest, entry):
        if reason := why_not_here(engine):
            return f"graph {graph.name!r}: {reason}"
    return None


def read_ensemble(manifest: Manifest, store: Store, folder: Path) -> BuiltEnsemble:
    """The build that an ensemble was published from. folder: for its golden data. Raises IntegrityError for missing
    data, and for a spec that this installation cannot read."""
    try:
        files = decode(manifest.spec.get("graphs"), dict[str, Json], "spec.graphs")
        # JSON in the registry has sorted keys; the pins have the order of the data flow.
        graph_files = {graph.name: files[graph.name] for graph in manifest.graphs}
        spec = EnsembleSpec.model_validate({**manifest.spec, "graphs": graph_files})
        digest = manifest.sources[GOLDEN]
    except (ValidationError, KeyError) as error:
        raise IntegrityError(f"{manifest.reference} cannot be read as an ensemble: {error}; build it again") from error
    manifests = {graph.name: load_pinned(store, graph) for graph in manifest.graphs}
    ensemble = LoadedEnsemble(spec, {name: spec_of(pinned_manifest) for name, pinned_manifest in manifests.items()})
    chain = {function.name: ChainedGraph.of_function(function) for function in functions_of(manifest)}
    for name, pinned_manifest in manifests.items():
        outputs = next((entry.outputs for entry in pinned_manifest.engines if entry.outputs), ())
        chain[name] = ChainedGraph(name, pinned_manifest.onnx, ensemble.tensors(name), outputs, ensemble.wiring()[name])
    path = folder / f"golden{Path(spec.golden.data).suffix}"
    store.fetch(digest, path)
    outputs = next(entry.outputs for entry in manifest.engines)
    golden = read_data(ensemble, spec.golden, (path, digest), spec.golden.labels)
    return BuiltEnsemble(ensemble, manifests, tuple(chain[name] for name in ensemble.wiring()), golden, outputs)


@dataclass(frozen=True)
class Pending:
    """A version, and those of its engines that wait for a proof that this machine or a worker with a GPU can give."""

    manifest: Manifest
    engines: tuple[EngineEntry, ...]


def list_pending(store: Store, only: str | None = None, on: Target | None = None) -> Iterator[Pending]:
    """Of each model's newest version and of the versions that its channels serve, the unproven engines that run here.

    only: that model alone.  on: as for `pending_of`.
    A version that cannot be read is left out with a warning; `enginesmith registry fsck` names it too.
    """
    for model in lookup.models(store) if only is None else [check_model(only)]:
        versions = lookup.versions(store, model)
        channel_list = (channel_state.read_channel(store, model, name) for name in lookup.channel_names(store, model))
        served_versions = {channel.version for channel in channel_list if channel}
        for version in sorted({*versions[-1:], *(served_versions & set(versions))}, key=version_order):
            try:
                pending_version = pending_of(store, model, version, on=on)
            except EnginesmithError as error:
                logging.getLogger(__name__).warning("%s@%s is left out: %s", model, version, error)
                continue
            if pending_version.engines:
                yield pending_version


def pending_of(store: Store, model: str, version: str, target: str | None = None, on: Target | None = None) -> Pending:
    """The unproven engines of a version that run here.

    target: only those for it, as `--target` names one.  on: instead those for this GPU, which Ray's workers have;
    whether they run there (compiler, versions) is asked there.
    Raises UnknownNameError, and IntegrityError for a version that cannot be read.
    """
    manifest = lookup.load(store, check_model(model), check_version(version))
    unproven_entries = filter(_is_unproven, _select_entries(store, manifest, target))
    return Pending(manifest, tuple(entry for entry in unproven_entries if _why_not(store, manifest, entry, on) is None))


def why_nothing(store: Store, pending_version: Pending, target: str | None = None, on: Target | None = None) -> str:
    """Why a version has no engine that could be proven here, or on workers. target, on: as for `pending_of`.  store:
    the registry.  pending_version: what `pending_of` gave."""
    manifest = pending_version.manifest
    entries = _select_entries(store, manifest, target)
    if unproven_entries := [entry for entry in entries if _is_unproven(entry)]:
        reasons = (_why_not(store, manifest, entry, on) for entry in unproven_entries)
        return "; ".join(dict.fromkeys(f"{manifest.reference}: {reason}" for reason in reasons))
    counts = Counter(entry.status for entry in entries if entry.digest)
    states = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    return f"{manifest.reference} has no unproven engine{f' for {target}' if target else ''}; it has {states}"


def validate_pending(pending_version: Pending, context: RunContext) -> list[Validated]:
    """Run a version's pending engines here and attach a report to each; those proven meanwhile are not run again.

    An error is the row of its version, also where the trust policy does not let the version run.
    """
    try:
        require(context.store, pending_version.manifest)
        digests = {str(entry.digest) for entry in pending_version.engines}
        return list(validate(pending_version.manifest, context, engines=digests, again=False))
    except EnginesmithError as error:
        return [Validated(pending_version.manifest.reference, None, "error", str(error))]


def _select_entries(store: Store, manifest: Manifest, target: str | None) -> list[EngineEntry]:
    """The entries for a target, with the status that they have on this machine's kind of CPU; None for all targets. A
    GPU generation includes its products."""
    entries = [entry.on_cpu(this_kind().name) for entry in judge_entries(store, manifest)]
    if target is None:
        return [*entries]
    targets = parse_targets(target)
    names, generations = {item.name for item in targets}, {item.sm for item in targets if item.product is None}
    return [entry for entry in entries if entry.target in names or entry.hardware.sm in generations]


def _is_unproven(entry: EngineEntry) -> bool:
    return entry.digest is not None and entry.status == "unproven"


def _why_not(store: Store, manifest: Manifest, entry: EngineEntry, on: Target | None) -> str | None:
    """Why an engine cannot be proven here, or is not for the GPU `on` of the workers; None when it can, or is. That of
    an ensemble cannot where one of its graphs cannot, and none can where a part is not measured."""
    if unmeasured_reason := why_unmeasured(entry, store):
        return unmeasured_reason
    if on is None:
        return ensemble_not_here(store, manifest, entry) if manifest.graphs else why_not_here(entry)
    hardware = entry.hardware
    if hardware.compute_capability == on.compute_capability and hardware.product in (None, on.product):
        return None
    return f"an unproven engine is for {entry.target}, but these workers have {on.name}"
