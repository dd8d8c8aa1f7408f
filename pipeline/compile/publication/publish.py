"""The last step: entries, manifest, report and channel for a judged plan; or the version that already says the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from enginery.core.digest import canonical_json, digest_of
from enginery.core.errors import EngineryError
from enginery.core.hardware.machine import describe_host
from enginery.core.origin import user
from enginery.core.reports.proof import Approved, approve
from enginery.core.requirements import for_target
from enginery.core.text import now
from enginery.registry.evidence.latencies import attach_latency
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.versions.publish import Published, find_published, find_same, publish, published_without
from pipeline.compile.causes import remember_builds
from pipeline.compile.publication import materials
from pipeline.compile.publication.pages import failed_page, version_page
from pipeline.compile.publication.provenance import with_provenance
from pipeline.compile.run_context import RunContext, versions
from pipeline.compile.verdict import JudgedUnit
from pipeline.outcome import EngineResult, Outcome
from pipeline.progress.events import VersionSettled
from pipeline.spec.model import ModelSpec
from pipeline.values import BuildPlan, Built, Exported, Json, Unit


def check_required(plan: BuildPlan) -> None:
    """Stop before any work when a unit that the spec requires is refused. Raises EngineryError."""
    lines = [f"{unit.name}: {unit.reason}" for unit in plan.refused if unit.required]
    if lines:
        remedy = "change the spec, or take them out of build.required"
        raise EngineryError(
            "\n".join([f"units that the spec requires are refused, so nothing was built; {remedy}:", *lines])
        )


def publish_version(
    spec: ModelSpec, exported: Exported, plan: BuildPlan, judged: Sequence[JudgedUnit], context: RunContext
) -> Outcome:
    """Publish what was proven or may be proven elsewhere; say what failed; recognise a run that changed nothing."""
    draft = _draft(spec, exported, plan, judged)
    sums = {item.built.digest: item.built.blake3 for item in judged if item.built.digest}
    sums[exported.model.digest] = exported.blake3
    published = _publish(spec, draft, judged, plan, context, sums)
    metrics = dict(draft.metrics)
    if published is None:
        page = failed_page(replace(draft, engines=tuple(_sorted_out(judged, plan)[1])), judged, context)
        return Outcome(spec.model, None, False, _results(judged, plan, ()), metrics, page=page)
    built = [item.built.unit.request for item in judged if item.built.digest]
    new = published.repeated or not published.existed
    with published_without(published.manifest, "what the next plan compares with, its latency reports and its page"):
        remember_builds(spec, exported, built, context, new=new)
    with published_without(published.manifest, "its latency reports and its page"):
        for item in judged:
            if item.latency:
                attach_latency(context.store, published.manifest, item.latency)
    with published_without(published.manifest, "its page"):
        page = version_page(published.manifest, judged, context)
    name = f"{spec.model}@{published.version}"
    same = name if published.repeated else None
    told = f"same as {name}" if same else "already published" if published.existed else "published"
    context.progress.emit(VersionSettled(spec.model if same else name, told))
    return Outcome(
        model=spec.model,
        version=published.version,
        cached=published.existed and all(item.built.cached for item in judged),
        engines=_results(judged, plan, published.manifest.engines),
        metrics=metrics,
        channel=None if same else spec.publication.channel,
        channel_refusal=published.channel_refusal,
        page=page,
        manifest=published.digest,
        same_as=same,
    )


def _publish(
    spec: ModelSpec,
    draft: Manifest,
    judged: Sequence[JudgedUnit],
    plan: BuildPlan,
    context: RunContext,
    sums: Mapping[str, str | None],
) -> Published | None:
    """None when no engine is fit to be published. Reports are stored only for a version that is new.

    sums: the BLAKE3 of blobs that are pulled, by their digests.
    """
    approved, others = _sorted_out(judged, plan)
    if not approved:
        return None
    entries = (*(entry for entry, _ in approved), *others)
    whole = replace(draft, engines=entries)
    if find_published(context.store, whole) is None:
        if same := find_same(context.store, whole, [proof.report for _, proof in approved], spec.version):
            return Published(same, existed=True, repeated=True)
        for _, proof in approved:
            context.store.put_bytes(canonical_json(proof.report.to_json()))
        draft = with_provenance(context.store, draft, entries, context.started_at)
    return publish(
        context.store,
        draft.with_blake3(sums),
        approved,
        others,
        channel=spec.publication.channel,
        wanted_version=spec.version,
        by=user(),
        why="built",
    )


def _sorted_out(
    judged: Sequence[JudgedUnit], plan: BuildPlan
) -> tuple[list[tuple[EngineEntry, Approved]], list[EngineEntry]]:
    """Engines with their approval, and everything that has none."""
    approved: list[tuple[EngineEntry, Approved]] = []
    others = [_refused_entry(unit) for unit in plan.refused]
    for item in judged:
        proof = approve(item.report) if item.report else None
        if proof is None:
            others.append(_failed_entry(item))
        else:
            approved.append((entry_of(item, proof.report.digest), proof))
    return approved, others


def _draft(spec: ModelSpec, exported: Exported, plan: BuildPlan, judged: Sequence[JudgedUnit]) -> Manifest:
    graphs = materials.graphs_of(plan)
    sources = {"onnx": exported.model.digest, "golden": exported.golden}
    sources |= {f"graph {graph.flavour.name}": graph.model for graph in graphs if graph.model != exported.model.digest}
    resolved = resolved_spec(spec)
    # How long engines are timed changes nothing about what they are.
    said = resolved | {"validation": {k: v for k, v in resolved["validation"].items() if k != "latency"}}
    provenance = {"spec": digest_of(said), **materials.data_digests(spec), **materials.scales(graphs)}
    units = [[item.built.unit.name, item.built.unit.request.key] for item in judged]
    refused = [[unit.name, unit.reason] for unit in plan.refused]
    content = digest_of({"spec": said, "sources": sources, "inputs": provenance, "units": units, "refused": refused})
    # What stands beside the engines changes nothing about what they are either.
    beside = materials.records(graphs) | materials.recipes(graphs) | materials.attributions(judged)
    return Manifest(
        model=spec.model,
        version="",
        created_at=now(),
        content=content,
        spec=resolved,
        sources=sources | beside | materials.layers(judged),
        provenance=provenance | materials.list_refitted(judged),
        toolchain=versions("enginery", "torch", "onnx", "onnxscript", "onnxruntime", "numpy"),
        host=describe_host(),
        metrics={graph.flavour.name: dict(graph.proof.metrics) for graph in graphs if graph.proof.metrics},
    )


def resolved_spec(spec: ModelSpec) -> Json:
    """The spec with every default filled in, as a manifest keeps it.

    But for limits: there null lifts a limit, so one that was not given must stay absent, or reading the manifest back
    would lift it. Publication, build and timeouts say where a version goes and what making it may cost, not what it is;
    a frozen golden set is named by its digest already.
    """
    costs = dict.fromkeys(("publication", "build", "timeouts"), True)
    resolved: Json = spec.model_dump(mode="json", exclude={**costs, "validation": True, "golden": {"frozen": True}})
    return {**resolved, "validation": spec.validation.model_dump(mode="json", exclude_unset=True)}


def _unit_fields(unit: Unit, built: Built | None = None) -> Json:
    """What an entry has of its unit; without an engine it requires the processor that the unit is for."""
    request = unit.request
    return {
        "target": request.target.name,
        "precision": request.precision,
        "backend": request.backend,
        "compute_capability": request.target.compute_capability,
        "product": request.target.product,
        "build_key": request.key,
        "graph": request.model,
        "scales": unit.graph.scales,
        "options": dict(request.options),
        "toolchain": dict(request.toolchain),
        "inputs": request.inputs,
        "outputs": request.outputs,
        "profiles": request.profiles,
        "requires": built.requires if built and built.requires else (for_target(request.target),),
    }


def _refused_entry(unit: Unit) -> EngineEntry:
    return EngineEntry(**_unit_fields(unit), status="refused", reason=unit.reason)


def _failed_entry(item: JudgedUnit) -> EngineEntry:
    return EngineEntry(
        **_unit_fields(item.built.unit),
        status="failed",
        reason=item.reason,
        checks=_counts(item),
        notes=(*item.built.unit.graph.notes, *item.built.notes),
    )


def entry_of(item: JudgedUnit, report: str) -> EngineEntry:
    """The manifest's entry of a unit with an engine. report: digest of its validation report."""
    built = item.built
    return EngineEntry(
        **_unit_fields(built.unit, built),
        status="proven" if item.verdict == "proven" else "unproven",
        reason=item.reason,
        digest=built.digest,
        size_bytes=built.size_bytes,
        suffix=built.suffix,
        report=report,
        checks=_counts(item),
        notes=(*built.unit.graph.notes, *built.notes),
    )


def _counts(item: JudgedUnit) -> dict[str, int]:
    found = Counter(check.passed for check in item.report.checks) if item.report else Counter[bool]()
    return {"passed": found[True], "failed": found[False]}


def _results(
    judged: Sequence[JudgedUnit], plan: BuildPlan, published: Sequence[EngineEntry]
) -> tuple[EngineResult, ...]:
    """One for each unit, in the plan's order. The published entries are the truth where there are any."""
    entries = {entry.unit: entry for entry in published}
    by_name = {item.built.unit.name: item for item in judged}
    return tuple(_result(unit, by_name.get(unit.name), entries.get(unit.name)) for unit in plan.units)


def _result(unit: Unit, item: JudgedUnit | None, entry: EngineEntry | None) -> EngineResult:
    if entry is None:
        entry = _failed_entry(item) if item else _refused_entry(unit)
    found = EngineResult(
        target=entry.target,
        precision=entry.precision,
        backend=entry.backend,
        digest=entry.digest,
        size_bytes=entry.size_bytes,
        status=entry.status,
        reason=entry.reason,
        checks=entry.checks,
        notes=entry.notes,
    )
    if item is None:
        return found
    built = item.built
    return replace(
        found,
        metrics=dict(item.metrics),
        cached=built.cached,
        seconds=0.0 if built.cached else built.seconds,
        attributed=item.attributed,
        failure=built.failure,
    )
