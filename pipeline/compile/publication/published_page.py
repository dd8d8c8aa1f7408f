"""The page of a run and the JSON it is drawn from: beside the version that it published, or under `failed/`.

A run of which no engine passed needs its page most: what failed, at which stage, at which node. That page is of
the model's last such run; the next one replaces it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from enginery.core.errors import IntegrityError
from enginery.core.reports.latency import LatencyReport
from enginery.registry.evidence.latencies import latencies
from enginery.registry.evidence.quantization import quantization_records
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.keys import failed_data_key, failed_page_key, page_data_key, page_key
from enginery.registry.versions.publish import attach_page
from pipeline.compile.run_context import RunContext
from pipeline.compile.verdict import JudgedUnit
from validation.attribution.published import attributions
from validation.attribution.result import NamedAttribution
from validation.reporting.version_document import VersionDocument


def version_page(manifest: Manifest, judged: Sequence[JudgedUnit], context: RunContext) -> str:
    """The version's HTML report, beside its manifest, with the JSON it is drawn from; written once. Its address."""
    store = context.store
    key, data_key = (place(manifest.model, manifest.version) for place in (page_key, page_data_key))
    if store.read(key) is None or store.read(data_key) is None:
        page, data = _draw(manifest, judged, context, latencies(store, manifest))
        attach_page(store, manifest, page, data)
    return place_of(store, key)


def failed_page(draft: Manifest, judged: Sequence[JudgedUnit], context: RunContext) -> str:
    """The same for a run that published nothing; drawn again only when something else came out. Its address.

    draft: its manifest as it would have been, with the engines that failed; its version is empty.
    """
    store = context.store
    key, data_key = failed_page_key(draft.model), failed_data_key(draft.model)
    before = failed_document(store, draft.model)
    known = (before.content, before.engines) if before else None
    if store.read(key) is None or known != (draft.content, draft.engines):
        page, data = _draw(draft, judged, context, {})
        for place, content in ((data_key, data), (key, page)):
            store.replace(place, content, store.read(place))
    return place_of(store, key)


def failed_document(store: Store, model: str) -> VersionDocument | None:
    """What the page of the last run that published nothing is drawn from; None where there is none to read."""
    from pipeline.compile.publication.pages import read_version

    try:
        return read_version(store.read(failed_data_key(model)) or b"", f"the last failed run of {model}")
    except IntegrityError:
        return None


def _draw(
    manifest: Manifest, judged: Sequence[JudgedUnit], context: RunContext, timed: Mapping[str, Sequence[LatencyReport]]
) -> tuple[bytes, bytes]:
    from pipeline.compile.publication.pages import draw_page, write_document

    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(Manifest)}
    document = VersionDocument(
        **fields,
        reports=tuple(item.report for item in judged if item.report),
        failures=tuple(item.built.failure for item in judged if item.built.failure),
        quantization=quantization_records(context.store, manifest),
        attributions=tuple(_collect_attributions(manifest, judged, context)),
        latencies={engine: tuple(found) for engine, found in timed.items()},
    )
    return draw_page(document).encode(), write_document(document)


def _collect_attributions(
    manifest: Manifest, judged: Sequence[JudgedUnit], context: RunContext
) -> Iterator[NamedAttribution]:
    """The page's sections, with the units that each is about."""
    units = {item.name: item.units for each in judged for item in each.attributed}
    for name, found in attributions(context.store, manifest).items():
        yield NamedAttribution(**vars(found), name=name, units=units.get(name, ()))
