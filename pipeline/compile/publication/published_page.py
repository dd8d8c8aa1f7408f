"""The page of a run and the JSON it is drawn from: beside the version that it published, or under `failed/`.

A run of which no engine passed needs its page most: what failed, at which joint, at which node. That page is of
the model's last such run; the next one replaces it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from enginery.registry.evidence.latencies import latencies
from enginery.registry.evidence.quantization import quantization_records
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.keys import failed_data_key, failed_page_key, page_data_key, page_key
from enginery.registry.versions.publish import attach_page
from pipeline.compile.run_context import Workshop
from pipeline.compile.verdict import Judged
from pipeline.values import Json
from validation.attribution.published import attributions


def version_page(manifest: Manifest, judged: Sequence[Judged], shop: Workshop) -> str:
    """The version's HTML report, beside its manifest, with the JSON it is drawn from; written once. Its address."""
    store = shop.store
    key, data_key = (place(manifest.model, manifest.version) for place in (page_key, page_data_key))
    if store.read(key) is None or store.read(data_key) is None:
        page, data = _drawn(manifest, judged, shop, latencies(store, manifest))
        attach_page(store, manifest, page, data)
    return place_of(store, key)


def failed_page(draft: Manifest, judged: Sequence[Judged], shop: Workshop) -> str:
    """The same for a run that published nothing; drawn again only when something else came out. Its address.

    draft: its manifest as it would have been, with the engines that failed; its version is empty.
    """
    store = shop.store
    key, data_key = failed_page_key(draft.model), failed_data_key(draft.model)
    before = failed_document(store, draft.model)
    engines = json.loads(json.dumps([asdict(entry) for entry in draft.engines]))
    if store.read(key) is None or (before.get("content"), before.get("engines")) != (draft.content, engines):
        page, data = _drawn(draft, judged, shop, {})
        for place, content in ((data_key, data), (key, page)):
            store.replace(place, content, store.read(place))
    return place_of(store, key)


def failed_document(store: Store, model: str) -> Json:
    """What the page of the last run that published nothing is drawn from; empty where there is none to read."""
    try:
        document = json.loads(store.read(failed_data_key(model)) or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _drawn(manifest: Manifest, judged: Sequence[Judged], shop: Workshop, timed: Json) -> tuple[bytes, bytes]:
    from pipeline.compile.publication.pages import drawn, version_document

    told: Json = {
        "reports": [item.report.to_json() for item in judged if item.report],
        "failures": [vars(item.built.failure) for item in judged if item.built.failure],
        "quantization": quantization_records(shop.store, manifest),
        "attributions": _attributed(manifest, judged, shop),
        "latencies": timed,
    }
    data = version_document(manifest, told)
    return drawn(json.loads(data)).encode(), data


def _attributed(manifest: Manifest, judged: Sequence[Judged], shop: Workshop) -> list[Json]:
    """The page's sections, with the units that each is about."""
    units = {item.name: list(item.units) for each in judged for item in each.attributed}
    found: dict[str, Any] = attributions(shop.store, manifest)
    return [{"name": name, "units": units.get(name, []), **item.to_json()} for name, item in found.items()]
