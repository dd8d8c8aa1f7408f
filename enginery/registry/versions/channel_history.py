"""A channel's history for people and auditors: who moved it, when, why, and on what evidence."""

from typing import Any

from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import Reference
from enginery.registry.store.base import Store
from enginery.registry.versions import channels, lookup


def history(store: Store, reference: Reference, limit: int | None = None) -> list[dict[str, Any]]:
    """The moves of a channel, or of all channels of a model, oldest first; at most `limit` of each, the newest.

    report: digest of the version's report, None when the version was deleted or is damaged since.  canary: digests of
    the canary reports that spoke for the move; all these are blobs. Raises UnknownNameError for what is not there, or
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
            row = {"channel": channel.name, **move.to_json(), "canary": list(move.canary)}
            rows.append({**row, "report": reports[move.manifest]})
    return sorted(rows, key=lambda row: str(row["at"]))


def _report(store: Store, model: str, move: channels.Move) -> str | None:
    try:
        manifest = lookup.load(store, model, move.version)
    except (UnknownNameError, IntegrityError):
        return None
    return manifest.report if manifest.digest == move.manifest else None
