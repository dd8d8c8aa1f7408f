"""Mends what a verification found: corrupt blobs are moved away, snapshots and feeds written anew."""

from contextlib import suppress
from dataclasses import dataclass

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.store.base import Store
from enginesmith.registry.verification.findings import FEED, SNAPSHOT, Verification
from enginesmith.registry.versions import feeds, refresh, rolling


@dataclass(frozen=True)
class Repairs:
    """What was mended. blobs: digests of corrupt ones that were moved away.  channels: of which (`model:channel`) the
    snapshots were written anew.  feeds: which were."""

    blobs: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()


def repair(store: Store, verification: Verification) -> Repairs:
    """Move corrupt blobs away, so that the next build makes them again, and write snapshots and feeds anew;
    what a killed writer has not written of a rollout is written.

    Raises InputError for a channel of a newer format.
    """
    corrupt = tuple(problem.what for problem in verification.problems if problem.kind == "corrupt")
    for digest in corrupt:
        store.discard(digest)
    channels = {item.what for item in verification.problems if item.kind == "stale" and ":" in item.what}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt", "size"):
            named = (affected.rpartition(" ") for affected in problem.affects)
            channels |= {where for where, _, what in named if what == SNAPSHOT}
    for where in sorted(channels):
        model, _, channel = where.partition(":")
        with hold_lease(store, f"refreshing {where}") as guard:
            refresh.refresh_channel(guard, model, channel)
    for model, channel in rolling.running_rollouts(store):
        with suppress(IntegrityError):  # a damaged channel is told above
            rolling.settle_rollout(store, model, channel)
    return Repairs(corrupt, tuple(sorted(channels)), _repair_feeds(store, verification))


def _repair_feeds(store: Store, verification: Verification) -> tuple[str, ...]:
    """Write feeds anew whose shards are lost or that lead elsewhere, by their patterns; one whose root is damaged has
    none that can be read, and stays."""
    named = {item.what for item in verification.problems if item.kind == "stale" and item.what.startswith(FEED)}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt"):
            named |= {item.removesuffix(" shard") for item in problem.affects if item.startswith(FEED)}
    mended = []
    for what in sorted(named):
        name = what.removeprefix(FEED)
        with suppress(IntegrityError):
            feeds.set_feed(store, name, feeds.read_feed(store, name).channels)
            mended.append(name)
    return tuple(mended)
