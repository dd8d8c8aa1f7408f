"""Draws pages from templates, and what is kept between runs so that only changed models are read."""

from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from enginesmith.core.errors import EnginesmithError, UnknownNameError
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.rollouts.rollout_state import EarlierRollout, Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Move
from enginesmith.registry.versions.index import ListedVersion, list_versions
from enginesmith.registry.versions.lookup import DEFAULT_CHANNELS
from pipeline.rollout.operations import describe_gates, list_wave_states
from pipeline.site.comparison import ReadChannel, ReadVersion, read_channels, read_version
from pipeline.site.folder import ModelKeys
from validation.canary.judging.criteria import describe_interval, describe_value
from validation.reporting.html import templates as report_templates

if TYPE_CHECKING:
    from jinja2 import Environment

# Draws the site's pages from templates, escaped and without inline scripts or styles, and its style sheet and script.
#
# Texts come from specs, logs and people; names of models and versions are restricted and become paths. Every page has
# the content security policy that a server would send, so that it holds in a bucket and in a folder, too.

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
# Of the copies of reports, which hold their style and no script.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_HEAD = b'<!doctype html>\n<html lang="en">\n<head>\n'


def draw(template: str, path: str, **values: object) -> bytes:
    """A page. path: where it will lie, relative to the site's folder, for the links from it."""
    root = "../" * path.count("/")
    page = _templates().get_template(f"{template}.html.j2").render(root=root, here=template, policy=POLICY, **values)
    return page.lstrip().encode()


@cache
def _templates() -> "Environment":
    from jinja2 import ChoiceLoader, PackageLoader

    base_templates = report_templates()
    loaders = [PackageLoader("pipeline.site", "templates"), PackageLoader("validation", ".")]
    environment = base_templates.overlay(loader=ChoiceLoader(loaders), auto_reload=False)
    environment.filters = base_templates.filters | {
        "interval": describe_interval,
        "criterion": lambda value, kind: "" if value is None else describe_value(value, kind),
        "gates": lambda rollout: ", ".join(describe_gates(rollout.plan.gates)),
        "waves": list_wave_states,
    }
    return environment


def style_sheet() -> bytes:
    """The style sheet: the report's, and what the site has besides."""
    report_folder = resources.files("validation")
    sheets = [(report_folder / "reporting" / name).read_text() for name in ("report.css", "drift.css")]
    sheets += [(report_folder / "latency" / "latency.css").read_text(), (_own() / "site.css").read_text()]
    return "\n".join(sheets).encode()


def script() -> bytes:
    """The script that searches and filters the index."""
    return (_own() / "site.js").read_bytes()


def copy_report(page: bytes) -> bytes:
    """A report as it was published, with a policy in front of all else, under which no script of it would run: whoever
    can write to the registry can write a page."""
    meta_tag = f'<meta http-equiv="Content-Security-Policy" content="{REPORT_POLICY}">\n'.encode()
    page = page.lstrip()
    return _HEAD + meta_tag + (page.removeprefix(_HEAD))


def _own() -> "resources.abc.Traversable":
    return resources.files("pipeline.site") / "templates"


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
    """The data for one model's pages. Its versions are read when a page needs them, each once. salt: digest of what all
    pages depend on."""

    store: Store
    keys: ModelKeys
    trust: Path | None
    salt: str
    _read: dict[str, ReadVersion] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model's name."""
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
    def listed(self) -> tuple[ListedVersion, ...]:
        """Its versions with their engines by status, oldest first; only those with a page, because versions may be
        added or deleted while the site is written."""
        try:
            all_versions = list_versions(self.store, self.model)
        except UnknownNameError:
            return ()
        return tuple(version for version in all_versions if version.version in self.versions)

    @cached_property
    def rollouts(self) -> tuple[tuple[Rollout, tuple[EarlierRollout, ...]], ...]:
        """The rollouts of its channels, also those that are finished, each with those before it, oldest first. What
        nodes report changes all the time: `enginesmith rollout status` reads it."""
        return tuple(
            (rollout, tuple(earlier for earlier in entry.history.rollouts if earlier.id != rollout.id))
            for entry in self.channels
            if entry.channel and (rollout := entry.channel.rollout)
        )

    @cached_property
    def usual(self) -> str:
        """The version that a reference without channel means: that of stable, else candidate, else the newest."""
        versions = {channel.name: channel.version for channel in self.channels}
        channel_versions = (versions[name] for name in DEFAULT_CHANNELS if versions.get(name) in self.versions)
        return next(channel_versions, None) or self.versions[-1]

    def read(self, version: str) -> ReadVersion:
        """A version, read once."""
        if version not in self._read:
            self._read[version] = read_version(self.store, self.model, version, self.trust)
        return self._read[version]

    def channels_at(self, version: str) -> tuple[str, ...]:
        """The channels that point to a version."""
        return tuple(channel.name for channel in self.channels if channel.version == version)

    def moves(self) -> list[ShownMove]:
        """The moves of all channels, newest first."""
        move_views = []
        for channel in self.channels:
            old_version: str | None = None
            for move in channel.history.moves:
                canary_links = tuple((digest, digest in self.canary_reports) for digest in move.canary)
                move_views.append(ShownMove(channel.name, move, old_version, canary_links))
                old_version = move.version
        return sorted(move_views, key=lambda view: view.move.at, reverse=True)

    @cached_property
    def canary_reports(self) -> set[str]:
        """Digests of the reports of canaries that are stored: those of verdicts, and those that channels were moved
        by."""
        move_digests = {digest for entry in self.channels for move in entry.history.moves for digest in move.canary}
        return {digest for digest in {*move_digests, *self.keys.canaries} if self.store.has(digest)}


# Facts of each model on the pages over all models, kept between runs so that only changed models are read.

# Number of canary verdicts that are kept per model.
MOST_OF_MODEL = 20


class ModelNote(TypedDict):
    """The values of one model on the pages over all models, as stored between runs. key: digest of its keys.

    version: that it serves by its usual channel, else its newest.  versions: all, oldest first.  statuses: number of
    that version's engines by status.  at: when it was published.  problem: why it cannot be read.  graphs: the models
    that it pins versions of, where it is an ensemble.  canaries: verdicts, each with the digest of its report, '' where
    that is lost.  rollouts: that nodes follow, each with the share of nodes that get its version already.
    """

    key: str
    version: str
    versions: list[str]
    at: str
    channels: dict[str, str]
    statuses: dict[str, int]
    targets: list[str]
    graphs: list[str]
    problem: str
    canaries: list[dict[str, str]]
    rollouts: list[dict[str, str]]


def note_of(site: ModelSite) -> ModelNote:
    """The note of a model."""
    default_version = next((version for version in site.listed if version.version == site.usual), None)
    try:
        manifest = lookup.load(site.store, site.model, site.usual)
        targets, graphs = [entry.target for entry in manifest.engines], [pin.model for pin in manifest.graphs]
    except EnginesmithError:  # the version's own page says so
        targets, graphs = [], []
    return ModelNote(
        key=site.keys.digest,
        version=site.usual,
        versions=list(site.versions),
        at=(default_version.created_at if default_version else None) or "",
        channels={channel.name: channel.version or "?" for channel in site.channels},
        statuses=dict(default_version.engines) if default_version else {},
        targets=list(dict.fromkeys(targets)),
        graphs=graphs,
        problem=(default_version.damage if default_version else None) or "",
        canaries=_canaries(site),
        rollouts=[
            {"channel": rollout.channel, "version": rollout.version, "reach": ", ".join(map(str, rollout.reach))}
            for rollout, _ in site.rollouts
            if not rollout.is_finished
        ],
    )


def _canaries(site: ModelSite) -> list[dict[str, str]]:
    """The newest verdicts of a model, newest first."""
    canary_notes: list[dict[str, str]] = []
    for version in site.versions if site.keys.canaries else ():
        try:
            manifest = lookup.load(site.store, site.model, version)
            verdicts = canaries(site.store, manifest)
        except EnginesmithError:  # the version's own page says so
            continue
        canary_notes += [
            {
                **{name: getattr(verdict, name) for name in ("target", "unit", "verdict", "reason", "against")},
                "version": version,
                "at": verdict.created_at,
                "report": verdict.report if verdict.report in site.canary_reports else "",
            }
            for verdict in verdicts
        ]
    return sorted(canary_notes, key=lambda note: note["at"], reverse=True)[:MOST_OF_MODEL]
