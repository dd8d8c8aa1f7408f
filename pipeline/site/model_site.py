"""What is read of one model for its pages, each thing once and only when a page needs it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import DEFAULT_CHANNELS, Move
from enginesmith.registry.versions.views import ListedVersion, list_versions
from pipeline.site.comparison import Facts, facts_of
from pipeline.site.keys import ModelKeys
from pipeline.site.machines import KnownMachines, MachineRow, machine_rows, served_by
from pipeline.site.reading import ReadChannel, ReadVersion, read_channels, read_version
from pipeline.site.shown.rollouts import ShownRollout, show_rollout
from pipeline.site.shown.series import ShownSeries, read_all_series


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
    def listed(self) -> tuple[ListedVersion, ...]:
        """Its versions with their engines by status, oldest first; those alone that have a page, since one may come or
        go while the site is made."""
        try:
            found = list_versions(self.store, self.model)
        except UnknownNameError:
            return ()
        return tuple(item for item in found if item.version in self.versions)

    @cached_property
    def rollouts(self) -> tuple[ShownRollout, ...]:
        """The rollouts of its channels, also those that are finished."""
        found = (show_rollout(item.channel, item.history) for item in self.channels if item.channel)
        return tuple(item for item in found if item)

    @cached_property
    def series(self) -> tuple[ShownSeries, ...]:
        """Its series of latencies."""
        return read_all_series(self.store, self.model)

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
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of an older and a newer version that have a page: each with the one before, and with each channel's."""
        order = {version: index for index, version in enumerate(self.versions)}
        found = dict.fromkeys(zip(self.versions, self.versions[1:], strict=False))
        for served in (channel.version for channel in self.channels if channel.version in order):
            for version in self.versions:
                if version != served:
                    older, newer = sorted((str(served), version), key=order.__getitem__)
                    found[older, newer] = None
        return tuple(found)

    def compared_with(self, version: str) -> tuple[tuple[str, str], ...]:
        """The other versions that a version is compared with, newest first, each with what it is: 'the one before',
        'the next', its channels."""
        order = {name: index for index, name in enumerate(self.versions)}
        others = sorted({*sum((pair for pair in self.pairs if version in pair), ())} - {version}, key=order.__getitem__)
        place = {-1: ("the one before",), 1: ("the next",)}
        return tuple(
            (other, ", ".join((*place.get(order[other] - order[version], ()), *self.channels_at(other))))
            for other in reversed(others)
        )

    @cached_property
    def machines(self) -> tuple[MachineRow, ...]:
        """What machines get of the model by what must be served."""
        served = served_by(self.store, self.known, self.model)
        return tuple(row for item in served for row in machine_rows(item, self.known))

    def moves(self) -> list[ShownMove]:
        """The moves of all channels, newest first."""
        found = []
        for channel in self.channels:
            before: str | None = None
            for move in channel.history.moves:
                shown = tuple((digest, digest in self.canary_reports) for digest in move.canary)
                found.append(ShownMove(channel.name, move, before, shown))
                before = move.version
        return sorted(found, key=lambda item: item.move.at, reverse=True)

    @cached_property
    def canary_reports(self) -> set[str]:
        """Digests of the reports of canaries that are stored: of verdicts, and of those that channels moved on."""
        moved = {digest for item in self.channels for move in item.history.moves for digest in move.canary}
        return {digest for digest in {*moved, *self.keys.canaries} if self.store.has(digest)}
