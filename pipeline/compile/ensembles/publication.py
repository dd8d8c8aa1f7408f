"""The version of an ensemble: which engines of its graphs it consists of for each target and precision, judged from
end to end, and published once all of its graphs are there."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from enginesmith.core.errors import canonical_json, digest_of
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.parsing import user
from enginesmith.core.reports.proof import approve
from enginesmith.core.requirements import GpuMemory, Requirement, for_target
from enginesmith.core.state import ENSEMBLE, PinnedGraph
from enginesmith.core.text import now
from enginesmith.core.types import PRECISIONS, Precision, Target, TensorSpec
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import (
    STATUSES,
    SUFFIX,
    EngineEntry,
    Manifest,
    Status,
    function_sources,
    write_engines,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.publish import find_published, publish, published_without
from pipeline.compile.ensembles.proof import ProveEnsemble, blame, prove, request_proof
from pipeline.compile.ensembles.whole import ChainedGraph, WholeData
from pipeline.compile.publication.pages import Measured, version_page, with_provenance
from pipeline.compile.publication.publish import TOOLS
from pipeline.compile.run_context import RunContext, versions
from pipeline.outcome import Outcome, UnitResult, engine_of, make_report
from pipeline.progress.events import VerdictReached, VersionSettled
from pipeline.spec.ensembles.model import LoadedEnsemble
from pipeline.spec.model import ModelSpec
from pipeline.values import Proof


@dataclass(frozen=True)
class EnsembleUnit:
    """An ensemble for a target in a precision. engines: by graph; graphs without an engine are left out.  lacking: why,
    by graph.
    """

    target: Target
    precision: Precision
    engines: Mapping[str, EngineEntry]
    lacking: Mapping[str, str]

    @classmethod
    def of(cls, entry: EngineEntry, engines: Mapping[str, EngineEntry]) -> "EnsembleUnit":
        """The unit of a published engine, with these engines of its graphs."""
        return cls(entry.hardware, entry.precision, engines, {})

    @property
    def name(self) -> str:
        """The unit's short name, for people: 'cpu int8 ensemble'."""
        return f"{self.target.name} {self.precision} {ENSEMBLE}"

    @property
    def status(self) -> tuple[Status, str]:
        """The worst status of the unit's engines, with the reason; 'refused' if a graph has no engine."""
        for graph, reason in self.lacking.items():
            return "refused", f"graph {graph!r} has no engine: {reason}"
        graph, worst_engine = max(self.engines.items(), key=lambda pair: STATUSES.index(pair[1].status))
        return worst_engine.status, "" if worst_engine.status == "proven" else f"graph {graph!r}: {worst_engine.reason}"

    def entry(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> EngineEntry:
        """The unit's entry in a manifest, without an engine. inputs, outputs: of the whole."""
        status, reason = self.status
        requirements = [requirement for entry in self.engines.values() for requirement in entry.requires]
        # Each once; the memory of all engines together.
        memory_bytes = sum(requirement.size_bytes for requirement in requirements if isinstance(requirement, GpuMemory))
        other_requirements = dict.fromkeys(
            requirement for requirement in requirements if not isinstance(requirement, GpuMemory)
        )
        requires: tuple[Requirement, ...] = (*other_requirements, *([GpuMemory(memory_bytes)] if memory_bytes else []))
        return EngineEntry(
            target=self.target.name,
            precision=self.precision,
            backend=ENSEMBLE,
            status=status,
            reason=reason,
            compute_capability=self.target.compute_capability,
            product=self.target.product,
            toolchain={name: text for entry in self.engines.values() for name, text in entry.toolchain.items()},
            inputs=inputs,
            outputs=outputs,
            requires=requires or (for_target(self.target),),
            notes=tuple(f"{graph}: {entry.unit}" for graph, entry in self.engines.items()),
        )

    def stored_entry(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], store: Store
    ) -> EngineEntry:
        """`entry` with the engine, a document that names those of the graphs, stored as a blob."""
        content, entry = write_engines(self.engines), self.entry(inputs, outputs)
        return replace(entry, digest=store.put_bytes(content), size_bytes=len(content), suffix=SUFFIX)


def list_units(
    graphs: Mapping[str, ModelSpec],
    engines: Mapping[str, Sequence[EngineEntry]],
    selections: Mapping[str, tuple[Sequence[Target], Sequence[Precision]]],
) -> Iterator[EnsembleUnit]:
    """A unit for each target and precision that a graph was built for. engines: of the graphs' versions.

    selections: by graph, what of its spec was asked for. A graph whose spec does not have a precision takes part in the
    widest that it has.
    """
    for target, precision in list_targets(selections.values()):
        engine_choices, lacking_reasons = dict[str, EngineEntry](), dict[str, str]()
        for name, spec in graphs.items():
            graph_precision = precision if precision in spec.precision_list() else spec.precision_list()[0]
            choice = _choose(engines[name], target, graph_precision)
            if isinstance(choice, str):
                lacking_reasons[name] = choice
            else:
                engine_choices[name] = choice
        if any(entry.precision == precision for entry in engine_choices.values()) or lacking_reasons:
            yield EnsembleUnit(target, precision, engine_choices, lacking_reasons)


def list_targets(
    selections: Collection[tuple[Sequence[Target], Sequence[Precision]]],
) -> list[tuple[Target, Precision]]:
    """Each target of any graph with each precision of any graph, from wide to narrow. selections: one per graph."""
    targets = dict.fromkeys(target for graph_targets, _ in selections for target in graph_targets)
    precisions = {precision for _, graph_precisions in selections for precision in graph_precisions}
    return [(target, kind) for target in targets for kind in PRECISIONS if kind in precisions]


def _choose(engines: Sequence[EngineEntry], target: Target, precision: Precision) -> EngineEntry | str:
    """The engine of a target and precision, proven ones first, then in the order of the spec's backends; else why there
    is none."""
    unit_entries = [entry for entry in engines if (entry.target, entry.precision) == (target.name, precision)]
    usable_entries = sorted(
        (entry for entry in unit_entries if entry.usable), key=lambda entry: entry.status != "proven"
    )
    if usable_entries:
        return usable_entries[0]
    return unit_entries[0].reason if unit_entries else f"its spec has no {target.name} {precision}"


# The manifest's source of this name is the golden data of the whole.
GOLDEN = "golden data"


@dataclass(frozen=True)
class BuiltEnsemble:
    """An ensemble whose graphs are all published. versions: manifests of the graphs."""

    loaded: LoadedEnsemble
    versions: Mapping[str, Manifest]
    chain: tuple[ChainedGraph, ...]
    golden: WholeData
    outputs: tuple[TensorSpec, ...]

    def request_proof(self, unit: EnsembleUnit) -> ProveEnsemble:
        """The request that proves a unit."""
        engines = {name: engine_of(engine) for name, engine in unit.engines.items()}
        return request_proof(self.loaded.spec, unit.precision, engines, self.golden, self.chain, self.outputs)

    def pins(self) -> tuple[PinnedGraph, ...]:
        """The versions of the ensemble's graphs, for its manifest."""
        wiring = self.loaded.wiring()
        graph_versions = self.versions.items()
        return tuple(
            PinnedGraph(name, manifest.model, manifest.version, manifest.digest, wiring[name])
            for name, manifest in graph_versions
        )


def judge_unit(unit: EnsembleUnit, ensemble: BuiltEnsemble, golden: str, context: RunContext) -> UnitResult:
    """The unit, run from end to end where each of its engines is proven. golden: digest of the data of the whole."""
    entry = unit.entry(ensemble.golden.inputs, ensemble.outputs)
    if not entry.usable:
        return UnitResult(entry)
    entry = unit.stored_entry(ensemble.golden.inputs, ensemble.outputs, context.store)
    obstacle = entry.reason if entry.status == "unproven" else None
    proof = Proof() if obstacle else prove(ensemble.request_proof(unit), unit.name, context)
    report = make_report(entry, golden, [proof], obstacle, remarks=blame(proof.checks))
    context.progress.emit(VerdictReached(unit.name, report.verdict, report.reason))
    judged_entry = replace(entry, status=report.verdict, reason=report.reason, report=report.digest)
    judged_entry = replace(judged_entry, checks=report.counts, sqnr_db=report.sqnr_db)
    if report.verdict == "failed":
        judged_entry = replace(judged_entry, digest=None, size_bytes=None, suffix=None, report=None)
    size = sum(ensemble.versions[name].size_of(engine) or 0 for name, engine in unit.engines.items())
    return UnitResult(judged_entry, size if judged_entry.digest else None, report, dict(proof.metrics))


def publish_ensemble(
    ensemble: BuiltEnsemble, units: Sequence[EnsembleUnit], context: RunContext, narrowed_reason: str | None = None
) -> Outcome:
    """Judge the units and publish the usable ones; returns the outcome, with the equal version if one existed already.

    narrowed_reason: `VersionDraft.narrowed`. Raises as `enginesmith.registry.versions.publish.publish` does."""
    store, spec = context.store, ensemble.loaded.spec
    golden = store.put_file(spec.file(spec.golden.data))
    judged_units = [judge_unit(unit, ensemble, golden, context) for unit in units]
    approved_proofs = [(unit.entry, proof) for unit in judged_units if unit.report and (proof := approve(unit.report))]
    other_entries = [unit.entry for unit in judged_units if not unit.entry.usable]
    if not approved_proofs:
        return Outcome(spec.model, None, False, tuple(judged_units), {})
    manifest = _draft(ensemble, golden, judged_units)
    full_manifest = replace(manifest, engines=(*(entry for entry, _ in approved_proofs), *other_entries))
    if find_published(store, full_manifest) is None:
        for _, proof in approved_proofs:
            store.put_bytes(canonical_json(proof.report.to_json()))
        manifest = with_provenance(store, manifest, full_manifest.engines, context.started_at)
    channel = spec.publication.channel
    publication = publish(
        store,
        manifest,
        approved_proofs,
        other_entries,
        channel=None if narrowed_reason else channel,
        wanted_version=spec.version,
        by=user(),
        why="built",
    )
    with published_without(publication.manifest, "its page"):
        reports = Measured(tuple(unit.report for unit in judged_units if unit.report))
        page = version_page(publication.manifest, reports, store)
    state_text = "already published" if publication.existed else "published"
    context.progress.emit(VersionSettled(f"{spec.model}@{publication.version}", state_text))
    return Outcome(
        model=spec.model,
        version=publication.version,
        cached=publication.existed,
        engines=tuple(judged_units),
        metrics={},
        channel=channel,
        channel_refusal=publication.channel_refusal,
        page=page,
        manifest=publication.digest,
        narrowed=narrowed_reason,
    )


def _draft(ensemble: BuiltEnsemble, golden: str, judged_units: Sequence[UnitResult]) -> Manifest:
    spec = ensemble.loaded.spec
    # Null lifts a limit, so one that was not given stays absent.
    limits = {name: limit.model_dump(mode="json", exclude_unset=True) for name, limit in spec.limits.items()}
    spec_document = spec.model_dump(mode="json", exclude={"publication", "limits"}) | (
        {"limits": limits} if limits else {}
    )
    sources = {GOLDEN: golden, **{f"onnx {graph.name}": graph.model for graph in ensemble.chain if not graph.function}}
    sources |= function_sources(graph.function for graph in ensemble.chain if graph.function)
    units = sorted([unit.entry.unit, unit.entry.status, str(unit.entry.digest)] for unit in judged_units)
    pins = [vars(pin) for pin in ensemble.pins()]
    return Manifest(
        model=spec.model,
        version="",
        created_at=now(),
        content=digest_of({"spec": spec_document, "sources": sources, "graphs": pins, "units": units}),
        spec=spec_document,
        sources=sources,
        toolchain=versions(*TOOLS),
        host=describe_host(),
        graphs=ensemble.pins(),
        metrics={unit.entry.unit: unit.metrics for unit in judged_units if unit.metrics},
    )


def current_engines(versions_of: Mapping[str, Manifest], context: RunContext) -> dict[str, Sequence[EngineEntry]]:
    """The engines of graphs' versions with their current status, by graph; for a CPU engine, that on this kind of
    CPU."""
    own_target = this_kind().name
    entries_by_graph = {name: judge_entries(context.store, manifest) for name, manifest in versions_of.items()}
    return {name: [entry.on_cpu(own_target) for entry in entries] for name, entries in entries_by_graph.items()}
