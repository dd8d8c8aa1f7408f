"""The pages over all models: the index with what is searched in the browser, canaries, the fleet, runs."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from enginesmith.core.errors import IntegrityError
from enginesmith.core.names import is_name
from enginesmith.core.parsing import parse_json
from enginesmith.core.text import now
from enginesmith.registry.builds.runs import RunState, read_runs, run_ids
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import FAILED, failed_data_key, failed_page_key
from pipeline.fleet.coverage import STATES
from pipeline.orchestration.runs.views import view_runs
from pipeline.site.drawing import copy_report, draw
from pipeline.site.folder import Page
from pipeline.site.keys import digest_lines
from pipeline.site.machines import NOT_ASKED, KnownMachines
from pipeline.site.notes import ModelNote

# Models on a page of the index, rows of the other pages.
PER_PAGE = 100
# Of the data of a report.
MOST_BYTES = 64 << 20
MOST_CANARIES, MOST_OF_MODEL, MOST_GAPS, MOST_RUNS = 300, 20, 500, 200


def overview_pages(
    store: Store, notes: Mapping[str, ModelNote], known: KnownMachines, title: str, salt: str
) -> Iterator[Page]:
    """The pages over all models, in the order of their names. salt: digest of what all pages depend on."""
    names = sorted(notes)
    failed = _failed(store)
    for model, sizes in failed.items():
        key = failed_page_key(model)
        draw_copy = partial(lambda key: copy_report(store.read(key) or b""), key)
        yield Page(f"failed/{model}/report.html", digest_lines([salt, *sizes]), draw_copy)
    yield Page("models.js", "", lambda: search_data(notes))
    yield Page("canaries.html", "", lambda: _canaries(notes))
    yield Page("fleet.html", "", lambda: _fleet(notes, known))
    yield Page("runs.html", "", lambda: _runs(store, notes, failed))
    pages = max(1, -(-len(names) // PER_PAGE))
    for number in range(pages, 0, -1):
        shown = names[(number - 1) * PER_PAGE : number * PER_PAGE]
        path = index_path(number)
        yield Page(path, "", partial(_index, path, shown, notes, number, title))


def _failed(store: Store) -> dict[str, list[str]]:
    """Each model that has a report of engines that failed, with the sizes of its files: the page, and its data, in
    which the digests of all reports are."""
    found: dict[str, list[str]] = {}
    for key, size in sorted(store.sizes(FAILED)):
        model = key.removeprefix(FAILED).partition("/")[0]
        if is_name(model):
            found.setdefault(model, []).append(f"{key} {size}")
    return {model: sizes for model, sizes in found.items() if len(sizes) == 2}


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
                [{item["channel"]: [item["version"], item["reach"]] for item in note["rollouts"]}]
                if note["rollouts"]
                else []
            ),
        ]
        for name, note in sorted(notes.items())
    ]
    return b"registryModels(" + json.dumps(rows, separators=(",", ":")).encode() + b");\n"


def _index(path: str, shown: Sequence[str], notes: Mapping[str, ModelNote], number: int, title: str) -> bytes:
    pages = [(index_path(each), each) for each in range(1, -(-len(notes) // PER_PAGE) + 1)]
    return draw(
        "index",
        path,
        title=title,
        models=[(name, notes[name]) for name in shown],
        count=len(notes),
        first=(number - 1) * PER_PAGE + 1,
        pages=pages,
        number=number,
        targets=sorted({target for note in notes.values() for target in note["targets"]}),
        channels=sorted({channel for note in notes.values() for channel in note["channels"]}),
        # The first page alone says when, so that the others change only with their models.
        at=now() if number == 1 else "",
    )


def _canaries(notes: Mapping[str, ModelNote]) -> bytes:
    found = [(name, item) for name, note in notes.items() for item in note["canaries"]]
    found.sort(key=lambda item: item[1]["at"], reverse=True)
    return draw("canaries", "canaries.html", rows=found[:MOST_CANARIES], more=max(0, len(found) - MOST_CANARIES))


def _fleet(notes: Mapping[str, ModelNote], known: KnownMachines) -> bytes:
    counts: dict[str, Counter[str]] = {}
    gaps = []
    for name, note in notes.items():
        for row in note["machines"]:
            for machine in row["machines"]:
                counts.setdefault(machine, Counter())[row["state"]] += 1
            if row["state"] not in ("covered", NOT_ASKED):
                gaps.append((name, row))
    order: Sequence[str] = STATES
    gaps.sort(key=lambda item: (order.index(item[1]["state"]), -item[1]["nodes"], item[0]))
    return draw(
        "fleet",
        "fleet.html",
        known=known,
        groups={group: dict(found) for group, found in counts.items()},
        not_asked=NOT_ASKED,
        nodes=sum(group.nodes for group in known.groups),
        states=STATES,
        rollouts=[(name, item) for name, note in sorted(notes.items()) for item in note["rollouts"]],
        gaps=gaps[:MOST_GAPS],
        more=max(0, len(gaps) - MOST_GAPS),
    )


def _written_at(store: Store, model: str) -> str | None:
    """When the report of a run that published nothing was made; None where it does not say."""
    with suppress(IntegrityError):
        return str(parse_json(store.read(failed_data_key(model)) or b"", MOST_BYTES).get("created_at") or "") or None
    return None


def _spans(run: RunState, at: str | None) -> bool:
    """Whether a time lies between the beginning and the end of a run; all of them to the second, in UTC."""
    return at is not None and run.started_at[:19] <= at[:19] <= (run.ended_at or at)[:19]


def _runs(store: Store, notes: Mapping[str, ModelNote], failed: Collection[str]) -> bytes:
    ids = run_ids(store)
    found = view_runs(store, read_runs(store, ids[:MOST_RUNS]))
    # Only what runs has a time that goes on, so the page of a registry where nothing runs stays as it is.
    live = [run for run in found if run.state == "running"]
    more = max(0, len(ids) - MOST_RUNS)
    written = {model: _written_at(store, model) for model in failed}
    failing = [view.run for view in found if view.state == "failed" and not view.run.version]
    reports = {run.id for run in failing if _spans(run, written.get(run.model))}
    at = now() if live else ""
    return draw("runs", "runs.html", live=live, runs=found, models=notes, more=more, at=at, reports=reports)
