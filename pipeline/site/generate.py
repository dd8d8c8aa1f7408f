"""Writes a registry's site into a folder: models whose keys changed since the last time, then the pages over all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import cast

from enginesmith.core.digest import digest_of_bytes
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust.policy import load_policy
from pipeline.site.drawing import script, style_sheet
from pipeline.site.folder import Page, SiteFolder, Written
from pipeline.site.keys import ModelKeys, digest_lines, read_models
from pipeline.site.machines import known_machines
from pipeline.site.model_pages import model_pages
from pipeline.site.model_site import ModelSite
from pipeline.site.notes import ModelNote, note_of
from pipeline.site.overview_pages import overview_pages

# Models between two notes of what was done, so that a run that is killed goes on from there.
_NOTED_EVERY = 500
# Groups of pages that are no model's.
_ASSETS, _OVERVIEW = "assets", "overview"


@dataclass(frozen=True)
class SiteSources:
    """What a site shows besides the registry. inventory, catalog: files of the fleet, as of `enginesmith fleet`; None
    for every GPU product.  trust: a trust policy to check signatures by.  title: in the head of every page."""

    inventory: Path | None = None
    catalog: Path | None = None
    trust: Path | None = None
    title: str = "Registry"


def write_site(
    store: Store, folder: SiteFolder, sources: SiteSources, say: Callable[[str], None] = lambda _: None
) -> Written:
    """Bring the site in a folder up to date with a registry, and return what was done.

    Raises UnavailableError when the registry is out of reach or the folder cannot be written, and as `known_machines`.
    """
    folder.done = Written()
    folder.sweep()
    known = known_machines(sources.inventory, sources.catalog)
    salt = _salt(sources)
    notes = cast("dict[str, ModelNote]", folder.read_overview())
    keys = _with_graphs({item.model: item for item in read_models(store, salt)}, notes)
    changed = [item for name, item in keys.items() if name not in notes or notes[name]["key"] != item.digest]
    folder.update(_ASSETS, [Page("site.css", "", style_sheet), Page("site.js", "", script)])
    # Pages to be deleted, by group, and what stays noted until they are: that something is left to do.
    gone: dict[str, list[str]] = {}
    unfinished: dict[str, ModelNote] = {}
    for number, item in enumerate(changed, 1):
        if paths := _write_model(folder, ModelSite(store, item, known, sources.trust, salt), notes):
            gone[_group(item.model)] = paths
            unfinished[item.model] = {**notes[item.model], "key": ""}
        if number % _NOTED_EVERY == 0:
            _keep(folder, {**notes, **unfinished})
            say(f"{number} of {len(changed)} changed models")
    for model in [name for name in notes if name not in keys]:
        unfinished[model] = notes.pop(model)
        gone[_group(model)] = folder.pages_of(_group(model))
    gone[_OVERVIEW] = folder.update(_OVERVIEW, overview_pages(store, notes, known, sources.title, salt))
    _keep(folder, {**notes, **unfinished})
    for group, paths in gone.items():
        folder.delete(group, paths)
    if any(gone.values()):
        _keep(folder, notes)
    return folder.done


def _with_graphs(keys: Mapping[str, ModelKeys], notes: Mapping[str, ModelNote]) -> dict[str, ModelKeys]:
    """The keys of models, those of ensembles with the digests of their graphs' models: what is found out about an
    engine of a graph holds for the whole."""
    # Notes of another release may lack it; what they are of is drawn again anyway.
    graphs = {name: notes[name].get("graphs", []) if name in notes else [] for name in keys}
    return {
        name: item.with_lines([keys[graph].digest for graph in graphs[name] if graph in keys])
        for name, item in keys.items()
    }


def _keep(folder: SiteFolder, notes: Mapping[str, ModelNote]) -> None:
    folder.keep(cast("Mapping[str, Mapping[str, object]]", notes))


def _write_model(folder: SiteFolder, site: ModelSite, notes: dict[str, ModelNote]) -> list[str]:
    """Draw a model's pages, and note what the pages over all show. Returns the pages that are no longer."""
    gone = folder.update(_group(site.model), model_pages(site))
    notes[site.model] = note_of(site)
    return gone


def _group(model: str) -> str:
    """The group of a model's pages."""
    return f"models/{model}"


def _salt(sources: SiteSources) -> str:
    """Digest of all that pages depend on besides the registry: our own files, and what the site is told."""
    files = [path for path in (sources.inventory, sources.catalog) if path]
    trust = repr(load_policy(sources.trust)) if sources.trust else ""
    return digest_lines([_code(), sources.title, trust, *(digest_of_bytes(path.read_bytes()) for path in files)])


@cache
def _code() -> str:
    """Digest of the files that draw pages."""
    parts = (
        resources.files("pipeline.site"),
        resources.files("pipeline.site.shown"),
        resources.files("pipeline.site") / "templates",
        resources.files("validation.reporting"),
    )
    found = (item for part in parts for item in sorted(part.iterdir(), key=lambda item: item.name))
    return digest_lines(digest_of_bytes(item.read_bytes()) for item in found if item.is_file())
