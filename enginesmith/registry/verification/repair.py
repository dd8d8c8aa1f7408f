"""Mends what a verification found: corrupt blobs are moved away, snapshots are written anew."""

from dataclasses import dataclass

from enginesmith.registry.leases import hold_lease
from enginesmith.registry.store.base import Store
from enginesmith.registry.verification.findings import SNAPSHOT, Verification
from enginesmith.registry.versions import refresh, rolling


@dataclass(frozen=True)
class Repairs:
    """What was mended. blobs: digests of corrupt ones that were moved away.  channels: of which (`model:channel`) the
    snapshots were written anew."""

    blobs: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


def repair(store: Store, verification: Verification) -> Repairs:
    """Move corrupt blobs away, so that the next build makes them again, and write snapshots anew; the
    marks of rollouts that do not run are removed.

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
        rolling.clear_marks(store, model, channel)
    return Repairs(corrupt, tuple(sorted(channels)))
