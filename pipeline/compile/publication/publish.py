"""Publishes what was approved: the draft of a manifest, its blobs, the version."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from enginesmith.client.layouts.triton_config import label_source
from enginesmith.client.resolve import PORTABLE
from enginesmith.core.errors import canonical_json, digest_of, digest_of_path
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.parsing import user
from enginesmith.core.reports.proof import Approved, approve
from enginesmith.core.text import format_bytes, now
from enginesmith.core.types import QUANTIZED
from enginesmith.registry.evidence.canaries import LAYERS, RECIPE, RECORD
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
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
from pipeline.compile.publication.pages import (
    DrawPage,
    Measured,
    add_attributions,
    failed_page,
    version_page,
    with_provenance,
)
from pipeline.compile.run_context import RunContext, Work, versions
from pipeline.outcome import Judged, JudgedUnit, Outcome, UnitResult, entry_of
from pipeline.progress.events import VersionSettled
from pipeline.spec.model import ModelSpec
from pipeline.values import Attributed, Exported, Graph, Json
from validation.attribution.result import NamedAttribution, attach_attribution, read_attribution
from validation.reporting.version_document import VersionDocument

# Entries of a manifest's provenance: the engine whose kernels another has, with other weights.
REFITTED = "refitted from"

# Of a unit whose checks failed on such inputs.
RANDOM_INPUTS = (
    "the checks ran on random numbers, on which many models answer nothing but noise; "
    "give real inputs in golden.data (enginesmith init --from-requests makes them)"
)
# Of an fp16 graph that overflowed.
UNMEASURED = (
    "without calibration data nothing says which tensors leave the range of fp16; with calibration.data these stay in "
    "fp32 (enginesmith init --from-requests makes it)"
)
# Of a graph that gives more or fewer rows after rounding.
SELECTING = (
    "how many rows an output has follows from the data, as where a graph selects boxes itself: rounding selects "
    "others; let a task metric judge (golden.metric with decides, docs/guides/bring-a-model.md)"
)
# What a version is made with, whichever compilers its engines come from.
TOOLS = ("enginesmith", "torch", "onnx", "onnxscript", "onnxruntime", "numpy")
HINTS = RANDOM_INPUTS, UNMEASURED, SELECTING


@dataclass(frozen=True)
class VersionDraft:
    """All that a run has to publish. manifest: without version and engines.

    units: all of the plan, in its order.  blake3: of blobs that are pulled, by digest, where known.
    channel, wanted_version: as the spec says.
    narrowed: the part of the spec that the run asked for, in words; None where that is all of it.
    reads: see `Exported`.  read_sources: reads what the engines were built from, for the next plan.
    """

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
        others = [unit.entry for unit in self.units if not unit.entry.usable]
        return tuple(sorted(others, key=lambda entry: entry.status != "refused"))

    @property
    def judged(self) -> list[JudgedUnit]:
        """The units that were not refused."""
        return [unit for unit in self.units if isinstance(unit, JudgedUnit)]


def draft_version(judgement: Judged, work: Work) -> VersionDraft:
    """What a run publishes of what it found. Raises OSError for a file of the spec that is gone."""
    spec, exported, plan = work.spec, judgement.exported, judgement.plan
    blake3 = {record.digest: record.blake3 for unit in judgement.units if (record := unit.built.record)}
    manifest = _draft_manifest(spec, judgement, _store_labels(spec, work.context.store))
    units: dict[str, UnitResult] = {unit.name: UnitResult(entry_of(unit)) for unit in plan.refused}
    for result in judgement.units:
        notes = (*result.entry.notes, *_hint(spec, exported, result))
        entry = replace(result.entry, notes=notes)
        units[result.built.unit.name] = replace(result, entry=entry, size_bytes=manifest.size_of(entry))
    larger = note_larger([units[unit.name] for unit in plan.units])

    def read_sources() -> BuildSources:
        return BuildSources(inputs_of(work), exported.reads, exported.model.digest, exported.golden)

    return VersionDraft(
        manifest=manifest,
        units=tuple(larger),
        blake3={**blake3, exported.model.digest: exported.model.blake3},
        channel=spec.publication.channel,
        wanted_version=spec.version,
        reads=exported.reads,
        read_sources=read_sources,
        narrowed=describe_narrowing(spec, work.selection),
    )


def _hint(spec: ModelSpec, exported: Exported, unit: JudgedUnit) -> Iterator[str]:
    """What data would show, or mend, of a unit whose checks failed; nothing of another."""
    checks = unit.report.checks if unit.report and unit.entry.status == "failed" else ()
    if checks and exported.golden_inputs is None:
        yield RANDOM_INPUTS
    overflows = any(check.name == "nonfinite" and not check.passed for check in checks)
    if overflows and unit.built.unit.request.precision == "fp16" and spec.calibration is None:
        yield UNMEASURED
    resized = any(check.name == "shape" and check.stage == "quantization" and not check.passed for check in checks)
    if resized and not (spec.golden and spec.golden.metrics):
        yield SELECTING


def note_larger(units: Sequence[UnitResult]) -> list[UnitResult]:
    """The units, with a note on each GPU engine that is narrower than fp16 and larger than the fp16 engine of its
    target and backend: what makes a compiler's int8 engine larger, such as weights kept in two forms, does not make it
    faster."""
    usable = [unit for unit in units if unit.entry.usable]
    fp16 = {(at.target, at.backend): unit.size_bytes for unit in usable if (at := unit.entry).precision == "fp16"}
    noted = []
    for unit in units:
        entry, size, half = unit.entry, unit.size_bytes, fp16.get((unit.entry.target, unit.entry.backend))
        on_gpu = entry.compute_capability is not None or entry.target == PORTABLE
        if entry.usable and on_gpu and entry.precision in QUANTIZED and size and half and size > half:
            note = f"larger than the fp16 engine ({format_bytes(size)} against {format_bytes(half)})"
            unit = replace(unit, entry=replace(entry, notes=(*entry.notes, note)))
        noted.append(unit)
    return noted


def _store_labels(spec: ModelSpec, store: Store) -> dict[str, str]:
    labels = spec.triton.labels
    return {label_source(output): store.put_file(spec.file(name)) for output, name in labels.items()}


def _draft_manifest(spec: ModelSpec, judgement: Judged, labels: Mapping[str, str]) -> Manifest:
    exported, plan, judged = judgement.exported, judgement.plan, judgement.units
    graphs = {unit.graph.variant: unit.graph for unit in plan.units}.values()
    sources = {"onnx": exported.model.digest, "golden": exported.golden, **labels}
    sources |= {f"graph {graph.variant.name}": graph.model for graph in graphs if graph.model != exported.model.digest}
    resolved = resolved_spec(spec)
    # How long engines are timed changes nothing about what they are.
    said = resolved | {"validation": {k: v for k, v in resolved["validation"].items() if k != "latency"}}
    # One method chooses other ranges for other schemes, so that each int8 graph has scales of its own.
    scales = {f"scales {graph.variant.name}": graph.scales for graph in graphs if graph.scales}
    provenance = {"spec": digest_of(said), **_digest_files(spec), **scales}
    units = [[unit.built.unit.name, unit.built.unit.request.key] for unit in judged]
    refused = [[unit.name, unit.reason] for unit in plan.refused]
    content = digest_of({"spec": said, "sources": sources, "inputs": provenance, "units": units, "refused": refused})
    return Manifest(
        model=spec.model,
        version="",
        created_at=now(),
        content=content,
        spec=resolved,
        # What stands beside the engines changes nothing about what they are either.
        sources=sources | _blobs_beside(graphs) | layers(judged),
        provenance=provenance | list_refitted(judged),
        toolchain=versions(*TOOLS),
        host=describe_host(),
        metrics={graph.variant.name: dict(graph.proof.metrics) for graph in graphs if graph.proof.metrics},
        shards=_list_shards(exported, graphs, judged),
    )


def _list_shards(
    exported: Exported, graphs: Collection[Graph], judged: Sequence[JudgedUnit]
) -> dict[str, dict[str, int]]:
    shards_by_model = {exported.model.digest: exported.model.shards}
    shards_by_model |= {graph.model: graph.shards for graph in graphs}
    shards_by_model |= {record.digest: record.shards for unit in judged if (record := unit.built.record)}
    return {digest: dict(shards) for digest, shards in shards_by_model.items() if shards}


def resolved_spec(spec: ModelSpec) -> Json:
    """The spec with every default filled in, as a manifest keeps it.

    But for limits: there null lifts a limit, so one that was not given must stay absent, or reading the manifest back
    would lift it. Publication, build and timeouts say where a version goes and what making it may cost, not what it is;
    a frozen golden set is named by its digest already.
    """
    costs = dict.fromkeys(("publication", "build", "timeouts"), True)
    resolved: Json = spec.model_dump(mode="json", exclude={**costs, "validation": True, "golden": {"frozen": True}})
    return {**resolved, "validation": spec.validation.model_dump(mode="json", exclude_unset=True)}


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
    of searches, which attribution writes graphs of."""
    extra_blobs = {f"{RECORD} {graph.variant.name}": graph.record for graph in graphs if graph.record}
    recipes = [(graph.variant.name, graph.recipe) for graph in graphs if graph.recipe]
    extra_blobs |= {f"{RECIPE} {variant}": recipe.digest for variant, recipe in recipes}
    return extra_blobs | {f"searched model of {variant}": recipe.model for variant, recipe in recipes if recipe.model}


def layers(judged: Sequence[JudgedUnit]) -> dict[str, str]:
    """Blobs with what compilers tell of the layers, per engine."""
    unit_extras = [(unit.built.unit.name, record.extras) for unit in judged if (record := unit.built.record)]
    return {f"{LAYERS} {unit}": extras["layers"] for unit, extras in unit_extras if "layers" in extras}


def list_refitted(judged: Sequence[JudgedUnit]) -> dict[str, str]:
    """Digests of the engines whose kernels these have, per engine that was refitted."""
    unit_records = [(unit.built.unit.name, record) for unit in judged if (record := unit.built.record)]
    return {f"{REFITTED} {unit}": record.refitted_from for unit, record in unit_records if record.refitted_from}


# The last step: a judged plan becomes a version with page and channel, or the version that already says the same.
#
# A version is published before it is looked for which node drifted in the units that failed, which takes minutes: what
# is proven does not wait for what failed. What is found then stands beside the version and on its page.


def publish_version(draft: VersionDraft, draw: Callable[[VersionDocument], str], context: RunContext) -> Outcome:
    """Publish what was proven or may be proven elsewhere; say what failed; recognise a run that changed nothing.

    draw: makes the HTML page of a version's document.  Raises as `enginesmith.registry.versions.publish.publish`.
    """
    store, manifest, judged = context.store, draft.manifest, draft.judged
    published = _publish(draft, context)
    if published is None:
        page = failed_page(replace(manifest, engines=draft.others), Measured.of(judged), store, draw)
        return Outcome(manifest.model, None, False, _list_results(draft), dict(manifest.metrics), page=page)
    built = [unit.built.unit.request for unit in judged if unit.built.digest]
    new = published.repeated or not published.existed
    with published_without(published.manifest, "what the next plan compares with, its latency reports and its page"):
        remember_builds(manifest.model, built, draft.reads, draft.read_sources, context, new)
    with published_without(published.manifest, "its latency reports and its page"):
        add_latencies(store, published.manifest, [unit.latency for unit in judged if unit.latency])
    name = f"{manifest.model}@{published.version}"
    same = name if published.repeated else None
    status_text = f"same as {name}" if same else "already published" if published.existed else "published"
    context.progress.emit(VersionSettled(manifest.model if same else name, status_text))
    # After that is said: with many engines the page's pictures take a while.
    with published_without(published.manifest, "its page"):
        page = version_page(published.manifest, Measured.of(judged), store, draw)
    return Outcome(
        model=manifest.model,
        version=published.version,
        cached=published.existed and all(unit.built.cached or unit.built.unit.action == "failed" for unit in judged),
        engines=_list_results(draft, published.manifest.engines),
        metrics=dict(manifest.metrics),
        channel=None if same else draft.channel,
        channel_refusal=published.channel_refusal,
        page=page,
        manifest=published.digest,
        same_as=same,
        narrowed=draft.narrowed,
    )


def _publish(draft: VersionDraft, context: RunContext) -> Published | None:
    """None when no engine is fit to be published. Reports are stored only for a version that is new."""
    approved, others = draft.approved, draft.others
    if not approved:
        return None
    store, manifest = context.store, draft.manifest
    entries = (*(entry for entry, _ in approved), *others)
    whole = replace(manifest, engines=entries)
    if find_published(store, whole) is None:
        if same := find_same(store, whole, [proof.report for _, proof in approved], draft.wanted_version):
            return Published(same, existed=True, repeated=True)
        for _, proof in approved:
            store.put_bytes(canonical_json(proof.report.to_json()))
        manifest = with_provenance(store, manifest, entries, context.started_at)
    return publish(
        store,
        manifest.with_blake3(draft.blake3),
        approved,
        others,
        channel=None if draft.narrowed else draft.channel,
        wanted_version=draft.wanted_version,
        by=user(),
        why="built",
    )


def _list_results(draft: VersionDraft, published: Sequence[EngineEntry] = ()) -> tuple[UnitResult, ...]:
    """One for each unit, in the plan's order. The published entries are the truth where there are any."""
    entries, size_of = {entry.unit: entry for entry in published}, draft.manifest.size_of
    pairs = ((unit, entries.get(unit.entry.unit, unit.entry)) for unit in draft.units)
    return tuple(replace(unit, entry=entry, size_bytes=size_of(entry)) for unit, entry in pairs)


def publish_attributions(
    outcome: Outcome, draft: VersionDraft, attributed: Sequence[Attributed], draw: DrawPage, context: RunContext
) -> Outcome:
    """The outcome with the attributions of each unit, which are then beside the version and on its page; where nothing
    was published, on the page of the run.

    attributed: what was found, or why nothing was.  draw: as of `publish_version`.
    draft: of the version.  context: of the run.
    """
    store = context.store
    named_attributions = tuple(
        NamedAttribution(
            **vars(read_attribution(store, attribution.digest)), name=attribution.name, units=attribution.units
        )
        for attribution in attributed
        if attribution.digest
    )
    if outcome.version is None:
        failed_page(
            replace(draft.manifest, engines=draft.others), Measured.of(draft.judged), store, draw, named_attributions
        )
    else:
        manifest = load(store, outcome.model, outcome.version)
        with published_without(manifest, "which node drifted in what failed"):
            for attribution in named_attributions:
                attach_attribution(store, manifest, attribution)
            add_attributions(manifest, store, draw)
    engines = [
        replace(
            engine,
            attributed=tuple(attribution for attribution in attributed if engine.entry.unit in attribution.units),
        )
        for engine in outcome.engines
    ]
    return replace(outcome, engines=tuple(engines))
