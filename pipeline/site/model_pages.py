"""The pages of one model: the model, each version with its report, pairs of versions side by side, canaries' reports."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from enginery.core.errors import IntegrityError
from enginery.registry.store.base import Store
from enginery.registry.store.layout import page_key
from enginery.registry.versions.lookup import DEFAULT_CHANNELS, Move
from enginery.registry.versions.views import list_versions
from pipeline.site.comparison import Facts, compare, facts_of
from pipeline.site.drawing import copy_report, draw
from pipeline.site.folder import Page
from pipeline.site.keys import ModelKeys, digest_lines
from pipeline.site.machines import KnownMachines, MachineRow, machine_rows, served_by, served_version, worst_first
from pipeline.site.reading import ReadChannel, ReadVersion, read_channels, read_version
from validation.canary.report import read_report
from validation.reporting.overview import VersionPage, overview

# Moves of a channel that the model's page shows; `enginery history` has all.
MOST_MOVES = 200


@dataclass(frozen=True)
class ShownMove:
    """A move of a channel. before: the version that it served until then, None for its first.  canaries: digests of
    reports, each with whether its page is here."""

    channel: str
    move: Move
    before: str | None
    canaries: tuple[tuple[str, bool], ...]


@dataclass
class ModelSite:
    """What is drawn of one model. Its versions are read when a page needs them, each once. salt: digest of what all
    pages depend on."""

    store: Store
    keys: ModelKeys
    known: KnownMachines
    trust: Path | None
    salt: str
    _read: dict[str, ReadVersion] = field(default_factory=dict)
    _facts: dict[str, Facts] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Its name."""
        return self.keys.model

    @property
    def folder(self) -> str:
        """The folder of its pages."""
        return f"models/{self.model}"

    @cached_property
    def channels(self) -> tuple[ReadChannel, ...]:
        """Its channels, as they are now."""
        return read_channels(self.store, self.model, self.keys.channels)

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """The names of its versions, oldest first."""
        return tuple(version for version, _ in self.keys.versions)

    @cached_property
    def usual(self) -> str:
        """The version that a reference without channel means: that of stable, else candidate, else the newest."""
        serving = {channel.name: channel.version for channel in self.channels}
        found = (serving[name] for name in DEFAULT_CHANNELS if serving.get(name) in self.versions)
        return next(found, None) or self.versions[-1]

    def read(self, version: str) -> ReadVersion:
        """A version, read once."""
        if version not in self._read:
            self._read[version] = read_version(self.store, self.model, version, self.trust)
        return self._read[version]

    def overview(self, version: str) -> VersionPage | None:
        """What pages show of a version; None where its manifest cannot be read."""
        document = self.read(version).document
        return overview(document, pictures=False) if document else None

    def facts(self, version: str) -> Facts | None:
        """What is compared of a version; None where its manifest cannot be read."""
        document = self.read(version).document
        if version not in self._facts and document:
            self._facts[version] = facts_of(document)
        return self._facts.get(version)

    def channels_at(self, version: str) -> tuple[str, ...]:
        """The channels that point to a version."""
        return tuple(channel.name for channel in self.channels if channel.version == version)

    @cached_property
    def pairs(self) -> dict[tuple[str, str], str]:
        """Pairs of an older and a newer version that have a page, each with what the older or newer one is: 'the one
        before', 'stable'."""
        order = {version: index for index, version in enumerate(self.versions)}
        found: dict[tuple[str, str], list[str]] = {}
        for before, after in zip(self.versions, self.versions[1:], strict=False):
            found.setdefault((before, after), []).append("the one before")
        for channel in self.channels:
            for version in self.versions:
                if channel.version in order and version != channel.version:
                    pair = sorted((str(channel.version), version), key=order.__getitem__)
                    found.setdefault((pair[0], pair[1]), []).append(channel.name)
        return {pair: ", ".join(dict.fromkeys(names)) for pair, names in found.items()}

    @cached_property
    def machines(self) -> tuple[MachineRow, ...]:
        """What machines get of the model by what must be served, those without an engine first."""
        served = served_by(self.store, self.known, self.model)
        return tuple(worst_first(row for item in served for row in machine_rows(item, self.known)))

    def moves(self) -> list[ShownMove]:
        """The moves of all channels, newest first."""
        found = []
        for channel in self.channels:
            before: str | None = None
            for move in channel.channel.history if channel.channel else ():
                shown = tuple((digest, digest in self.canary_reports) for digest in move.canary)
                found.append(ShownMove(channel.name, move, before, shown))
                before = move.version
        return sorted(found, key=lambda item: item.move.at, reverse=True)

    @cached_property
    def canary_reports(self) -> set[str]:
        """Digests of the reports of canaries that are stored: of verdicts, and of those that channels moved on."""
        channels = (item.channel for item in self.channels if item.channel)
        moved = {digest for channel in channels for move in channel.history for digest in move.canary}
        return {digest for digest in {*moved, *self.keys.canaries} if self.store.has(digest)}


def model_pages(site: ModelSite) -> Iterator[Page]:
    """The pages of a model; those that others link to come first."""
    digests = dict(site.keys.versions)
    for digest in sorted(site.canary_reports):
        path = f"{site.folder}/canaries/{digest}.html"
        yield Page(path, digest_lines([site.salt, digest]), lambda path=path, digest=digest: _canary(site, path, digest))
    for version in site.versions:
        if report := _report_page(site, version, digests[version]):
            yield report
    for (before, after), what in site.pairs.items():
        path = f"{site.folder}/compare/{before}/{after}.html"
        key = digest_lines([site.salt, digests[before], digests[after], what])
        yield Page(path, key, lambda path=path, a=before, b=after: _comparison(site, path, a, b))
    for version in site.versions:
        path = f"{site.folder}/versions/{version}/index.html"
        key = digest_lines([site.salt, digests[version], *site.channels_at(version), repr(_pairs_of(site, version))])
        yield Page(path, key, lambda path=path, version=version: _version(site, path, version))
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


def _pairs_of(site: ModelSite, version: str) -> tuple[tuple[str, str], ...]:
    """The other versions that a version is compared with, newest first, each with what it is."""
    found = [(a if b == version else b, what) for (a, b), what in site.pairs.items() if version in (a, b)]
    return tuple(sorted(found, key=lambda item: site.versions.index(item[0]), reverse=True))


def _model(site: ModelSite, path: str) -> bytes:
    moves = site.moves()
    return draw(
        "model",
        path,
        site=site,
        versions=list_versions(site.store, site.model)[::-1],
        pairs={version: _pairs_of(site, version) for version in site.versions},
        order={version: index for index, version in enumerate(site.versions)},
        moves=moves[:MOST_MOVES],
        more=max(0, len(moves) - MOST_MOVES),
        machines=site.machines,
    )


def _version(site: ModelSite, path: str, version: str) -> bytes:
    read, page = site.read(version), site.overview(version)
    rows: Sequence[MachineRow] = ()
    if read.document:
        rows = machine_rows(served_version(site.model, version, read.document.engines), site.known)
    return draw(
        "version",
        path,
        site=site,
        version=version,
        read=read,
        page=page,
        channels=site.channels_at(version),
        pairs=_pairs_of(site, version),
        order={known: index for index, known in enumerate(site.versions)},
        machines=rows,
        report=_report_page(site, version, "") is not None,
        spec=json.dumps(read.document.spec, indent=2, ensure_ascii=False) if read.document else "",
    )


def _comparison(site: ModelSite, path: str, before: str, after: str) -> bytes:
    facts = site.facts(before), site.facts(after)
    sections = compare(*facts) if facts[0] is not None and facts[1] is not None else ()
    return draw("comparison", path, site=site, before=before, after=after, sections=sections)


def _canary(site: ModelSite, path: str, digest: str) -> bytes:
    report = None
    with suppress(IntegrityError):
        report = read_report(site.store.read_blob(digest))
    return draw("canary", path, site=site, digest=digest, report=report)
