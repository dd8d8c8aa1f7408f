"""The last step: a judged plan becomes a version with page and channel, or the version that already says the same."""

from collections.abc import Callable
from dataclasses import replace

from enginesmith.core.digest import canonical_json
from enginesmith.core.origin import user
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.versions.additions import add_latencies
from enginesmith.registry.versions.publish import Published, find_published, find_same, publish, published_without
from pipeline.compile.last_builds import remember_builds
from pipeline.compile.publication.draft import VersionDraft
from pipeline.compile.publication.pages import Measured, failed_page, version_page
from pipeline.compile.publication.provenance import with_provenance
from pipeline.compile.run_context import RunContext
from pipeline.outcome import EngineResult, JudgedUnit, Outcome
from pipeline.progress.events import VersionSettled
from validation.reporting.version_document import VersionDocument


def publish_version(draft: VersionDraft, draw: Callable[[VersionDocument], str], context: RunContext) -> Outcome:
    """Publish what was proven or may be proven elsewhere; say what failed; recognise a run that changed nothing.

    draw: makes the HTML page of a version's document.  Raises as `enginesmith.registry.versions.publish.publish`.
    """
    store, manifest, judged = context.store, draft.manifest, draft.judged
    published = _publish(draft, context)
    if published is None:
        page = failed_page(replace(manifest, engines=draft.others), Measured.of(judged), store, draw)
        return Outcome(manifest.model, None, False, _list_results(draft, ()), dict(manifest.metrics), page=page)
    built = [item.built.unit.request for item in judged if item.built.digest]
    new = published.repeated or not published.existed
    with published_without(published.manifest, "what the next plan compares with, its latency reports and its page"):
        remember_builds(manifest.model, built, draft.reads, draft.read_sources, context, new)
    with published_without(published.manifest, "its latency reports and its page"):
        add_latencies(store, published.manifest, [item.latency for item in judged if item.latency])
    name = f"{manifest.model}@{published.version}"
    same = name if published.repeated else None
    told = f"same as {name}" if same else "already published" if published.existed else "published"
    context.progress.emit(VersionSettled(manifest.model if same else name, told))
    # After that is said: with many engines the page's pictures take a while.
    with published_without(published.manifest, "its page"):
        page = version_page(published.manifest, Measured.of(judged), store, draw)
    return Outcome(
        model=manifest.model,
        version=published.version,
        cached=published.existed and all(item.built.cached or item.built.unit.action == "failed" for item in judged),
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
    if not draft.approved:
        return None
    store, manifest = context.store, draft.manifest
    entries = (*(entry for entry, _ in draft.approved), *draft.others)
    caches = [(item.entry, item.proof) for item in draft.caches if item.proof]
    unmade = [item.entry for item in draft.caches if not item.proof]
    whole = replace(manifest, engines=entries, caches=(*(entry for entry, _ in caches), *unmade))
    if find_published(store, whole) is None:
        if same := find_same(store, whole, [proof.report for _, proof in draft.approved], draft.wanted_version):
            return Published(same, existed=True, repeated=True)
        for _, proof in (*draft.approved, *caches):
            store.put_bytes(canonical_json(proof.report.to_json()))
        manifest = with_provenance(store, manifest, entries, context.started_at)
    return publish(
        store,
        manifest.with_blake3(draft.blake3),
        draft.approved,
        draft.others,
        caches=caches,
        unmade=unmade,
        channel=None if draft.narrowed else draft.channel,
        wanted_version=draft.wanted_version,
        by=user(),
        why="built",
    )


def _list_results(draft: VersionDraft, published: tuple[EngineEntry, ...]) -> tuple[EngineResult, ...]:
    """One for each unit, in the plan's order. The published entries are the truth where there are any."""
    sizes = {entry.unit: draft.manifest.size_of(entry) for entry in published}
    entries = {entry.unit: entry for entry in (*draft.others, *published)}
    judged = {item.built.unit.name: item for item in draft.judged}
    found = (_result(entries[unit], judged.get(unit)) for unit in draft.units)
    engines = tuple(replace(result, size_bytes=sizes.get(result.unit)) for result in found)
    return (*engines, *(_result(item.entry, None) for item in draft.caches))


def _result(entry: EngineEntry, item: JudgedUnit | None) -> EngineResult:
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
        free_running=item.report.free_running if item.report else (),
        cached=built.cached,
        seconds=0.0 if built.cached else built.seconds,
        failure=built.failure,
    )
