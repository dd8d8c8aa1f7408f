"""The pages of one model: the model, versions with their reports, pairs of them side by side, canaries' reports, its
latencies over time."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.layout import page_key
from pipeline.site.comparison import compare
from pipeline.site.drawing import copy_report, draw
from pipeline.site.folder import Page
from pipeline.site.keys import digest_lines
from pipeline.site.machines import MachineRow, machine_rows, served_version
from pipeline.site.model_site import ModelSite
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
    for before, after in site.pairs:
        path = f"{site.folder}/compare/{before}/{after}.html"
        key = digest_lines([site.salt, digests[before], digests[after]])
        yield Page(path, key, partial(_comparison, site, path, before, after))
    for version in site.versions:
        path = f"{site.folder}/versions/{version}/index.html"
        key = digest_lines([site.salt, digests[version], *site.channels_at(version), repr(site.compared_with(version))])
        yield Page(path, key, partial(_version, site, path, version))
    if site.series:
        path = f"{site.folder}/latency.html"
        yield Page(path, site.keys.digest, partial(draw, "series", path, site=site))
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
        pairs={version: site.compared_with(version) for version in site.versions},
        order={version: index for index, version in enumerate(site.versions)},
        moves=moves[:MOST_MOVES],
        more=max(0, len(moves) - MOST_MOVES),
        machines=site.machines,
        links={version: f"versions/{version}/index.html" for version in site.versions},
    )


def _version(site: ModelSite, path: str, version: str) -> bytes:
    read = site.read(version)
    rows: Sequence[MachineRow] = ()
    if read.document:
        targets = read.document.spec.get("targets")
        rows = machine_rows(served_version(site.model, version, read.document.engines, targets), site.known)
    return draw(
        "version",
        path,
        site=site,
        version=version,
        read=read,
        page=read.page,
        channels=site.channels_at(version),
        pairs=site.compared_with(version),
        order={known: index for index, known in enumerate(site.versions)},
        machines=rows,
        report=_report_page(site, version, "") is not None,
        spec=json.dumps(read.document.spec, indent=2, ensure_ascii=False) if read.document else "",
    )


def _comparison(site: ModelSite, path: str, before: str, after: str) -> bytes:
    older, newer = site.facts(before), site.facts(after)
    sections = compare(older, newer) if older is not None and newer is not None else ()
    return draw("comparison", path, site=site, before=before, after=after, sections=sections)


def _canary(site: ModelSite, path: str, digest: str) -> bytes:
    report = None
    with suppress(IntegrityError):
        report = read_report(site.store.read_blob(digest))
    return draw(
        "canary", path, site=site, digest=digest, report=report, headline=HEADLINES[report.verdict] if report else ""
    )
