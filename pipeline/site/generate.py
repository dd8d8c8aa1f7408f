"""Writes a registry's site into a folder."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import cast

from enginesmith.core.errors import IntegrityError, digest_of_bytes
from enginesmith.core.text import now
from enginesmith.registry.builds.runs import read_runs, run_ids
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import page_key
from enginesmith.registry.trust.policy import load_policy
from pipeline.orchestration.runs.views import view_runs
from pipeline.site.drawing import ModelNote, ModelSite, copy_report, draw, note_of, script, style_sheet
from pipeline.site.folder import ModelKeys, Page, SiteFolder, Written, digest_lines, read_models
from validation.canary.page import HEADLINES
from validation.canary.report import read_report

# Moves of a channel that the model's page shows; `enginesmith registry history` has all.
MOST_MOVES = 200


def model_pages(site: ModelSite) -> Iterator[Page]:
    """The pages of a model; those that others link to come first."""
    digests = dict(site.keys.versions)
    for digest in sorted(site.canary_reports):
        path = f"{site.folder}/canaries/{digest}.html"
        yield Page(path, digest_lines([site.salt, digest]), partial(_canary, site, path, digest))
    for version in site.versions:
        if report := _report_page(site, version, digests[version]):
            yield report
    for version in site.versions:
        path = f"{site.folder}/versions/{version}/index.html"
        key = digest_lines([site.salt, digests[version], *site.channels_at(version)])
        yield Page(path, key, partial(_version, site, path, version))
    path = f"{site.folder}/index.html"
    yield Page(path, site.keys.digest, lambda: _model(site, path))


def _report_page(site: ModelSite, version: str, digest: str) -> Page | None:
    """The copy of a version's report, as it was published; None where there is none."""
    key = page_key(site.model, version)
    folder, _, name = key.rpartition("/")
    if name not in site.store.children(f"{folder}/"):
        return None
    path = f"{site.folder}/versions/{version}/report.html"
    return Page(path, digest_lines([site.salt, digest]), lambda: copy_report(site.store.read(key) or b""))


def _model(site: ModelSite, path: str) -> bytes:
    moves = site.moves()
    return draw(
        "model",
        path,
        site=site,
        versions=site.listed[::-1],
        moves=moves[:MOST_MOVES],
        more=max(0, len(moves) - MOST_MOVES),
    )


def _version(site: ModelSite, path: str, version: str) -> bytes:
    version_view = site.read(version)
    return draw(
        "version",
        path,
        site=site,
        version=version,
        read=version_view,
        page=version_view.page,
        channels=site.channels_at(version),
        report=_report_page(site, version, "") is not None,
        spec=json.dumps(version_view.document.spec, indent=2, ensure_ascii=False) if version_view.document else "",
    )


def _canary(site: ModelSite, path: str, digest: str) -> bytes:
    report = None
    with suppress(IntegrityError):
        report = read_report(site.store.read_blob(digest))
    return draw(
        "canary", path, site=site, digest=digest, report=report, headline=HEADLINES[report.verdict] if report else ""
    )


# Models on a page of the index, rows of the other pages.
PER_PAGE = 100
MOST_CANARIES, MOST_RUNS = 300, 200


def overview_pages(store: Store, notes: Mapping[str, ModelNote]) -> Iterator[Page]:
    """The pages over all models, in the order of their names."""
    names = sorted(notes)
    yield Page("models.js", "", lambda: search_data(notes))
    yield Page("canaries.html", "", lambda: _canaries(notes))
    yield Page("runs.html", "", lambda: _runs(store, notes))
    page_count = max(1, -(-len(names) // PER_PAGE))
    for number in range(page_count, 0, -1):
        page_names = names[(number - 1) * PER_PAGE : number * PER_PAGE]
        path = index_path(number)
        yield Page(path, "", partial(_index, path, page_names, notes, number))


def index_path(number: int) -> str:
    """The page of the index with this number, from 1."""
    return "index.html" if number == 1 else f"index-{number}.html"


def search_data(notes: Mapping[str, ModelNote]) -> bytes:
    """All models as a script, which a page may load from a folder, too: a row of values each, in the order of the
    columns that `site.js` names."""
    rows = [
        [
            *(name, note["version"], len(note["versions"]), note["at"], note["channels"], note["statuses"]),
            *(note["targets"], bool(note["problem"])),
            *(
                [{rollout["channel"]: [rollout["version"], rollout["reach"]] for rollout in note["rollouts"]}]
                if note["rollouts"]
                else []
            ),
        ]
        for name, note in sorted(notes.items())
    ]
    return b"registryModels(" + json.dumps(rows, separators=(",", ":")).encode() + b");\n"


def _index(path: str, names: Sequence[str], notes: Mapping[str, ModelNote], number: int) -> bytes:
    pages = [(index_path(page_number), page_number) for page_number in range(1, -(-len(notes) // PER_PAGE) + 1)]
    return draw(
        "index",
        path,
        models=[(name, notes[name]) for name in names],
        count=len(notes),
        first=(number - 1) * PER_PAGE + 1,
        pages=pages,
        number=number,
        targets=sorted({target for note in notes.values() for target in note["targets"]}),
        channels=sorted({channel for note in notes.values() for channel in note["channels"]}),
        # Only the first page has the time, so that the others change only with their models.
        at=now() if number == 1 else "",
    )


def _canaries(notes: Mapping[str, ModelNote]) -> bytes:
    canary_rows = [(name, canary) for name, note in notes.items() for canary in note["canaries"]]
    canary_rows.sort(key=lambda row: row[1]["at"], reverse=True)
    return draw(
        "canaries", "canaries.html", rows=canary_rows[:MOST_CANARIES], more=max(0, len(canary_rows) - MOST_CANARIES)
    )


def _runs(store: Store, notes: Mapping[str, ModelNote]) -> bytes:
    ids = run_ids(store)
    run_views = view_runs(store, read_runs(store, ids[:MOST_RUNS]))
    # Only what runs has a time that goes on, so the page of a registry where nothing runs stays as it is.
    live_runs = [run for run in run_views if run.state == "running"]
    excess = max(0, len(ids) - MOST_RUNS)
    drawn_at = now() if live_runs else ""
    return draw("runs", "runs.html", live=live_runs, runs=run_views, models=notes, more=excess, at=drawn_at)


# Models between two notes of what was done, so that a run that is killed goes on from there.
_NOTED_EVERY = 500
# Groups of pages that are no model's.
_ASSETS, _OVERVIEW = "assets", "overview"


def write_site(
    store: Store, folder: SiteFolder, trust: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> Written:
    """Bring the site in a folder up to date with a registry, and return what was done. trust: a trust policy to check
    signatures by.

    Raises UnavailableError when the registry is out of reach or the folder cannot be written.
    """
    folder.done = Written()
    folder.sweep()
    # Of all that pages depend on besides the registry: our own files, and the trust policy.
    salt = digest_lines([_code(), repr(load_policy(trust)) if trust else ""])
    notes = cast("dict[str, ModelNote]", folder.read_overview())
    keys = _with_graphs({model_keys.model: model_keys for model_keys in read_models(store, salt)}, notes)
    changed_models = [
        model_keys for name, model_keys in keys.items() if name not in notes or notes[name]["key"] != model_keys.digest
    ]
    folder.update(_ASSETS, [Page("site.css", "", style_sheet), Page("site.js", "", script)])
    # Pages to be deleted, by group, and what stays noted until they are: that something is left to do.
    dropped_pages: dict[str, list[str]] = {}
    unfinished_notes: dict[str, ModelNote] = {}
    for number, model_keys in enumerate(changed_models, 1):
        site = ModelSite(store, model_keys, trust, salt)
        paths = folder.update(_group(site.model), model_pages(site))
        notes[site.model] = note_of(site)
        if paths:
            dropped_pages[_group(model_keys.model)] = paths
            unfinished_notes[model_keys.model] = {**notes[model_keys.model], "key": ""}
        if number % _NOTED_EVERY == 0:
            folder.keep({**notes, **unfinished_notes})
            say(f"{number} of {len(changed_models)} changed models")
    for model in [name for name in notes if name not in keys]:
        unfinished_notes[model] = notes.pop(model)
        dropped_pages[_group(model)] = folder.pages_of(_group(model))
    dropped_pages[_OVERVIEW] = folder.update(_OVERVIEW, overview_pages(store, notes))
    folder.keep({**notes, **unfinished_notes})
    for group, paths in dropped_pages.items():
        folder.delete(group, paths)
    if any(dropped_pages.values()):
        folder.keep(notes)
    return folder.done


def _with_graphs(keys: Mapping[str, ModelKeys], notes: Mapping[str, ModelNote]) -> dict[str, ModelKeys]:
    """The keys of models, those of ensembles with the digests of their graphs' models: results on an engine of a graph
    also hold for the ensemble."""
    # Notes of another release may lack it; what they are of is drawn again anyway.
    graphs = {name: notes[name].get("graphs", []) if name in notes else [] for name in keys}
    return {
        name: model_keys.with_lines([keys[graph].digest for graph in graphs[name] if graph in keys])
        for name, model_keys in keys.items()
    }


def _group(model: str) -> str:
    """The group of a model's pages."""
    return f"models/{model}"


@cache
def _code() -> str:
    """Digest of the files that draw pages."""
    folders = (
        resources.files("pipeline.site"),
        resources.files("pipeline.site") / "templates",
        resources.files("validation.reporting"),
    )
    code_files = (file for folder in folders for file in sorted(folder.iterdir(), key=lambda file: file.name))
    return digest_lines(digest_of_bytes(file.read_bytes()) for file in code_files if file.is_file())
