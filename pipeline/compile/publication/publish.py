"""Publishes approved units: the draft of a manifest, its blobs, the version."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from enginesmith.client.layouts.triton_config import label_source
from enginesmith.core.errors import canonical_json, digest_of, digest_of_path
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.parsing import user
from enginesmith.core.reports.proof import Approved, approve
from enginesmith.core.text import now
from enginesmith.registry.evidence.canaries import LAYERS, RECIPE, RECORD
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import (
    Published,
    add_latencies,
    find_published,
    find_same,
    publish,
    published_without,
)
from pipeline.compile.causes import BuildSources, inputs_of, remember_builds
from pipeline.compile.plan import describe_narrowing
from pipeline.compile.publication.pages import Measured, add_attributions, failed_page, version_page, with_provenance
from pipeline.compile.run_context import RunContext, Work, versions
from pipeline.outcome import Judged, JudgedUnit, Outcome, UnitResult, entry_of
from pipeline.progress.events import VersionSettled
from pipeline.spec.model import ModelSpec
from pipeline.values import Attributed, Exported, Graph, Json
from validation.attribution.result import NamedAttribution, attach_attribution, read_attribution

# Entries of a manifest's provenance: the engine that was refitted with other weights.
REFITTED = "refitted from"
# Of a unit whose checks failed on such inputs.
RANDOM_INPUTS = (
    "the checks ran on random numbers, for which many models answer only noise; "
    "give real inputs in golden.data (enginesmith init --from-requests makes them)"
)
# Of an fp16 graph that overflowed.
UNMEASURED = (
    "without calibration data nothing says which tensors leave the range of fp16; with calibration.data these stay in "
    "fp32 (enginesmith init --from-requests makes it)"
)
# Of a graph that gives more or fewer rows after rounding.
SELECTING = (
    "the number of rows of an output depends on the data, such as boxes that the graph selects: rounding selects "
    "others; let a task metric judge (golden.metric with decides, docs/guides/bring-a-model.md)"
)
# Packages that make every version, with any compiler.
TOOLS = ("enginesmith", "torch", "onnx", "onnxscript", "onnxruntime", "numpy")
HINTS = RANDOM_INPUTS, UNMEASURED, SELECTING


@dataclass(frozen=True)
class VersionDraft:
    """Everything that a run may publish. manifest: without version and engines.

    units: of the whole plan, in order.  blake3: digest of a pulled blob -> its BLAKE3; None if unknown.
    narrowed: the part of the spec that the run was limited to, as text; None for the whole spec.
    reads: see `Exported`.  read_sources: returns the engines' build sources, for the next plan."""

    manifest: Manifest
    units: tuple[UnitResult, ...]
    blake3: Mapping[str, str | None]
    channel: str | None
    wanted_version: str | None
    reads: str
    read_sources: Callable[[], BuildSources]
    narrowed: str | None = None

    @property
    def approved(self) -> list[tuple[EngineEntry, Approved]]:
        """Each usable engine with its proof."""
        return [(unit.entry, proof) for unit in self.units if unit.report and (proof := approve(unit.report))]

    @property
    def others(self) -> tuple[EngineEntry, ...]:
        """The units that were refused or failed, refused ones first."""
        other_entries = [unit.entry for unit in self.units if not unit.entry.usable]
        return tuple(sorted(other_entries, key=lambda entry: entry.status != "refused"))

    @property
    def judged(self) -> list[JudgedUnit]:
        """The units that were not refused."""
        return [unit for unit in self.units if isinstance(unit, JudgedUnit)]


def draft_version(judgement: Judged, work: Work) -> VersionDraft:
    """The draft of a run's version. Raises OSError if a file of the spec is missing."""
    spec, export, plan = work.spec, judgement.exported, judgement.plan
    blake3_digests = {record.digest: record.blake3 for unit in judgement.units if (record := unit.built.record)}
    label_files = {label_source(output): spec.file(name) for output, name in spec.triton.labels.items()}
    labels = {source: work.context.store.put_file(file) for source, file in label_files.items()}
    manifest = _draft_manifest(spec, judgement, labels)
    units: dict[str, UnitResult] = {unit.name: UnitResult(entry_of(unit), local=unit.local) for unit in plan.refused}
    for result in judgement.units:
        notes = (*result.entry.notes, *_hint(spec, export, result))
        units[result.built.unit.name] = replace(result, entry=replace(result.entry, notes=notes))

    def read_sources() -> BuildSources:
        return BuildSources(inputs_of(work), export.reads, export.model.digest, export.golden)

    return VersionDraft(
        manifest=manifest,
        units=tuple(units[unit.name] for unit in plan.units),
        blake3={**blake3_digests, export.model.digest: export.model.blake3},
        channel=spec.publication.channel,
        wanted_version=spec.version,
        reads=export.reads,
        read_sources=read_sources,
        narrowed=describe_narrowing(spec, work.selection),
    )


def _hint(spec: ModelSpec, export: Exported, unit: JudgedUnit) -> Iterator[str]:
    """Hints which data would explain or fix a unit's failed checks."""
    checks = unit.report.checks if unit.report and unit.entry.status == "failed" else ()
    if checks and export.golden_inputs is None:
        yield RANDOM_INPUTS
    has_overflow = any(check.name == "nonfinite" and not check.passed for check in checks)
    if has_overflow and unit.built.unit.request.precision == "fp16" and spec.calibration is None:
        yield UNMEASURED
    is_resized = any(check.name == "shape" and check.stage == "quantization" and not check.passed for check in checks)
    if is_resized and not (spec.golden and spec.golden.metrics):
        yield SELECTING


def _draft_manifest(spec: ModelSpec, judgement: Judged, labels: Mapping[str, str]) -> Manifest:
    export, plan, judged_units = judgement.exported, judgement.plan, judgement.units
    graphs = {unit.graph.variant: unit.graph for unit in plan.units}.values()
    sources = {"onnx": export.model.digest, "golden": export.golden, **labels}
    sources |= {f"graph {graph.variant.name}": graph.model for graph in graphs if graph.model != export.model.digest}
    document = resolved_spec(spec)
    # The settings for timing engines do not change the engines.
    spec_document = document | {"validation": {k: v for k, v in document["validation"].items() if k != "latency"}}
    # One method chooses different ranges for different schemes: each int8 graph has its own scales.
    scales = {f"scales {graph.variant.name}": graph.scales for graph in graphs if graph.scales}
    provenance = {"spec": digest_of(spec_document), **_digest_files(spec), **scales}
    units = [[unit.built.unit.name, unit.built.unit.request.key] for unit in judged_units]
    refused_units = [[unit.name, unit.published_reason] for unit in plan.refused]
    shards_by_model = {export.model.digest: export.model.shards} | {graph.model: graph.shards for graph in graphs}
    shards_by_model |= {record.digest: record.shards for unit in judged_units if (record := unit.built.record)}
    content_digest = digest_of(
        {"spec": spec_document, "sources": sources, "inputs": provenance, "units": units, "refused": refused_units}
    )
    return Manifest(
        model=spec.model,
        version="",
        created_at=now(),
        content=content_digest,
        spec=document,
        # Documents beside the engines do not change the content digest either.
        sources=sources | _blobs_beside(graphs) | layers(judged_units),
        provenance=provenance | list_refitted(judged_units),
        toolchain=versions(*TOOLS),
        host=describe_host(),
        metrics={graph.variant.name: dict(graph.proof.metrics) for graph in graphs if graph.proof.metrics},
        shards={digest: dict(shards) for digest, shards in shards_by_model.items() if shards},
    )


def resolved_spec(spec: ModelSpec) -> Json:
    """The spec with every default filled in, as a manifest keeps it.

    Limits get no defaults: null lifts a limit, and a limit that is not set must stay absent, or reading the manifest
    back would lift it. Publication, build and timeouts are left out, because they do not describe the version's
    content; so is `golden.frozen`: the manifest already names the golden set by digest.
    """
    excluded_keys = dict.fromkeys(("publication", "build", "timeouts"), True)
    document: Json = spec.model_dump(
        mode="json", exclude={**excluded_keys, "validation": True, "golden": {"frozen": True}}
    )
    return {**document, "validation": spec.validation.model_dump(mode="json", exclude_unset=True)}


def _digest_files(spec: ModelSpec) -> dict[str, str]:
    files = {
        "source": spec.source_file,
        "weights": spec.source.weights,
        "calibration data": spec.calibration.file if spec.calibration else None,
        "golden data": spec.golden.data if spec.golden else None,
    }
    return {name: digest_of_path(spec.file(file)) for name, file in files.items() if file}


def _blobs_beside(graphs: Collection[Graph]) -> dict[str, str]:
    """Blobs to keep beside a version, by name: the records of quantization, the recipes of graphs, and the float models
    of searches, from which attribution writes graphs."""
    extra_blobs = {f"{RECORD} {graph.variant.name}": graph.record for graph in graphs if graph.record}
    recipes = [(graph.variant.name, graph.recipe) for graph in graphs if graph.recipe]
    extra_blobs |= {f"{RECIPE} {variant}": recipe.digest for variant, recipe in recipes}
    return extra_blobs | {f"searched model of {variant}": recipe.model for variant, recipe in recipes if recipe.model}


def layers(judged_units: Sequence[JudgedUnit]) -> dict[str, str]:
    """Blobs with the compilers' layer information, per engine."""
    unit_extras = [(unit.built.unit.name, record.extras) for unit in judged_units if (record := unit.built.record)]
    return {f"{LAYERS} {unit}": extras["layers"] for unit, extras in unit_extras if "layers" in extras}


def list_refitted(judged_units: Sequence[JudgedUnit]) -> dict[str, str]:
    """For each refitted engine, the digest of the engine whose kernels it reuses."""
    unit_records = [(unit.built.unit.name, record) for unit in judged_units if (record := unit.built.record)]
    return {f"{REFITTED} {unit}": record.refitted_from for unit, record in unit_records if record.refitted_from}


# A version is published before the search for the drifted nodes of failed units, which takes minutes: proven units do
# not wait for it. The attributions are then added beside the version and to its page.


def publish_version(draft: VersionDraft, context: RunContext) -> Outcome:
    """Publish the engines that are proven or may be proven elsewhere, report failures, and detect a run that changed
    nothing.

    Raises as `enginesmith.registry.versions.publish.publish`.
    """
    store, manifest, judged_units = context.store, draft.manifest, draft.judged
    publication = _publish(draft, context)
    if publication is None:
        page = failed_page(replace(manifest, engines=draft.others), Measured.of(judged_units), store)
        return Outcome(manifest.model, None, False, _list_results(draft), dict(manifest.metrics), page=page)
    build_requests = [unit.built.unit.request for unit in judged_units if unit.built.digest]
    is_new = publication.repeated or not publication.existed
    with published_without(publication.manifest, "what the next plan compares with, its latency reports and its page"):
        remember_builds(manifest.model, build_requests, draft.reads, draft.read_sources, context, is_new)
    with published_without(publication.manifest, "its latency reports and its page"):
        add_latencies(store, publication.manifest, [unit.latency for unit in judged_units if unit.latency])
    name = f"{manifest.model}@{publication.version}"
    same_version = name if publication.repeated else None
    status_text = f"same as {name}" if same_version else "already published" if publication.existed else "published"
    context.progress.emit(VersionSettled(manifest.model if same_version else name, status_text))
    # Drawn after the event is emitted: with many engines, the page's pictures take a while.
    with published_without(publication.manifest, "its page"):
        page = version_page(publication.manifest, Measured.of(judged_units), store)
    return Outcome(
        model=manifest.model,
        version=publication.version,
        cached=publication.existed
        and all(unit.built.cached or unit.built.unit.action == "failed" for unit in judged_units),
        engines=_list_results(draft, publication.manifest.engines),
        metrics=dict(manifest.metrics),
        channel=None if same_version else draft.channel,
        channel_refusal=publication.channel_refusal,
        page=page,
        manifest=publication.digest,
        same_as=same_version,
        narrowed=draft.narrowed,
    )


def _publish(draft: VersionDraft, context: RunContext) -> Published | None:
    """Publish the version; None if no engine is approved. Reports are stored only for a new version."""
    approved_proofs, other_entries = draft.approved, draft.others
    if not approved_proofs:
        return None
    store, manifest = context.store, draft.manifest
    entries = (*(entry for entry, _ in approved_proofs), *other_entries)
    full_manifest = replace(manifest, engines=entries)
    if find_published(store, full_manifest) is None:
        if same_version := find_same(
            store, full_manifest, [proof.report for _, proof in approved_proofs], draft.wanted_version
        ):
            return Published(same_version, existed=True, repeated=True)
        for _, proof in approved_proofs:
            store.put_bytes(canonical_json(proof.report.to_json()))
        manifest = with_provenance(store, manifest, entries, context.started_at)
    return publish(
        store,
        manifest.with_blake3(draft.blake3),
        approved_proofs,
        other_entries,
        channel=None if draft.narrowed else draft.channel,
        wanted_version=draft.wanted_version,
        by=user(),
        why="built",
    )


def _list_results(draft: VersionDraft, published_entries: Sequence[EngineEntry] = ()) -> tuple[UnitResult, ...]:
    """A result for each unit, in the plan's order; from the published entries, if there are any."""
    entries, size_of = {entry.unit: entry for entry in published_entries}, draft.manifest.size_of
    pairs = ((unit, entries.get(unit.entry.unit, unit.entry)) for unit in draft.units)
    return tuple(replace(unit, entry=entry, size_bytes=size_of(entry)) for unit, entry in pairs)


def publish_attributions(
    outcome: Outcome, draft: VersionDraft, attributions: Sequence[Attributed], context: RunContext
) -> Outcome:
    """The outcome with the attributions of each unit. They are stored beside the version and drawn on its page; if
    nothing was published, on the page of the failed run.

    attributions: each with its finding, or the reason for none.
    """
    store = context.store
    named_attributions = tuple(
        NamedAttribution(
            **vars(read_attribution(store, attribution.digest)), name=attribution.name, units=attribution.units
        )
        for attribution in attributions
        if attribution.digest
    )
    if outcome.version is None:
        manifest = replace(draft.manifest, engines=draft.others)
        failed_page(manifest, Measured.of(draft.judged), store, named_attributions)
    else:
        manifest = load(store, outcome.model, outcome.version)
        with published_without(manifest, "which node drifted in what failed"):
            for attribution in named_attributions:
                attach_attribution(store, manifest, attribution)
            add_attributions(manifest, store)
    engines = [
        replace(
            engine,
            attributed=tuple(attribution for attribution in attributions if engine.entry.unit in attribution.units),
        )
        for engine in outcome.engines
    ]
    return replace(outcome, engines=tuple(engines))
