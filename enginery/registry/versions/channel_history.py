"""A channel's history for people and auditors: who moved it, when, why, and on what evidence."""

from dataclasses import dataclass

from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import Reference
from enginery.registry.store.base import Store
from enginery.registry.versions import channels, lookup


@dataclass(frozen=True)
class ChannelMove:
    """A move of a channel.

    report: digest of the version's report, None when the version was deleted or is damaged since.
    """

    channel: str
    move: channels.Move
    report: str | None

    def to_json(self) -> dict[str, object]:
        """What `enginery history --json` prints of it."""
        return {"channel": self.channel, **self.move.to_json(), "report": self.report}


def history(store: Store, reference: Reference, limit: int | None = None) -> list[ChannelMove]:
    """The moves of a channel, or of all channels of a model, oldest first; at most `limit` of each, the newest.

    Raises UnknownNameError for what is not there, or
    a reference to a version.
    """
    if reference.version is not None:
        raise UnknownNameError(f"only channels have a history; {str(reference)!r} is a version: give {reference.model}")
    names = [reference.channel] if reference.channel else channels.names(store, reference.model)
    found = [channel for name in names if (channel := channels.read(store, reference.model, name))]
    if not found:
        known = ", ".join(channels.names(store, reference.model)) or "none"
        raise UnknownNameError(f"no channel {str(reference)!r} in {store.uri}; channels of {reference.model}: {known}")
    reports: dict[str, str | None] = {}
    rows = []
    for channel in found:
        moves = channel.history if limit is None else channel.history[max(0, len(channel.history) - limit) :]
        for move in moves:
            if move.manifest not in reports:
                reports[move.manifest] = _report(store, channel.model, move)
            rows.append(ChannelMove(channel.name, move, reports[move.manifest]))
    return sorted(rows, key=lambda row: row.move.at)


def _report(store: Store, model: str, move: channels.Move) -> str | None:
    try:
        manifest = lookup.load(store, model, move.version)
    except (UnknownNameError, IntegrityError):
        return None
    return manifest.report if manifest.digest == move.manifest else None
