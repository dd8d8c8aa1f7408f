"""The last step: a judged plan becomes a version with page and channel, or the version that already says the same.

A version is published before it is looked for which node drifted in the units that failed, which takes minutes: what is
proven does not wait for what failed. What is found then stands beside the version and on its page.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from enginesmith.core.digest import canonical_json
from enginesmith.core.origin import user
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.versions.additions import add_latencies
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import Published, find_published, find_same, publish, published_without
from pipeline.compile.causes import remember_builds
from pipeline.compile.publication.draft import VersionDraft
from pipeline.compile.publication.pages import DrawPage, Measured, add_attributions, failed_page, version_page
from pipeline.compile.publication.provenance import with_provenance
from pipeline.compile.run_context import RunContext
from pipeline.outcome import JudgedUnit, Outcome, UnitResult
from pipeline.progress.events import VersionSettled
from pipeline.values import Attributed
from validation.attribution.result import NamedAttribution, attach_attribution, read_attribution
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


def _list_results(draft: VersionDraft, published: tuple[EngineEntry, ...]) -> tuple[UnitResult, ...]:
    """One for each unit, in the plan's order. The published entries are the truth where there are any."""
    sizes = {entry.unit: draft.manifest.size_of(entry) for entry in published}
    entries = {entry.unit: entry for entry in (*draft.others, *published)}
    judged = {item.built.unit.name: item for item in draft.judged}
    engines = tuple(_result(entries[unit], sizes.get(unit), judged.get(unit)) for unit in draft.units)
    return (*engines, *(UnitResult(item.entry, item.entry.size_bytes) for item in draft.caches))


def _result(entry: EngineEntry, size_bytes: int | None, item: JudgedUnit | None) -> UnitResult:
    if item is None:
        return UnitResult(entry, size_bytes)
    return UnitResult(entry, size_bytes, item.report, dict(item.metrics), item.built)


def publish_attributions(
    outcome: Outcome, draft: VersionDraft, attributed: Sequence[Attributed], draw: DrawPage, context: RunContext
) -> Outcome:
    """The outcome with the attributions of each unit, which are then beside the version and on its page; where nothing
    was published, on the page of the run.

    attributed: what was found, or why nothing was.  draw: as of `publish_version`.
    """
    store = context.store
    found = tuple(
        NamedAttribution(**vars(read_attribution(store, item.digest)), name=item.name, units=item.units)
        for item in attributed
        if item.digest
    )
    if outcome.version is None:
        failed_page(replace(draft.manifest, engines=draft.others), Measured.of(draft.judged), store, draw, found)
    else:
        manifest = load(store, outcome.model, outcome.version)
        with published_without(manifest, "which node drifted in what failed"):
            for item in found:
                attach_attribution(store, manifest, item)
            add_attributions(manifest, store, draw)
    engines = [
        replace(engine, attributed=tuple(item for item in attributed if engine.unit in item.units))
        for engine in outcome.engines
    ]
    return replace(outcome, engines=tuple(engines))
