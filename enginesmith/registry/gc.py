"""Garbage collection: a sweep marks garbage, and deletes garbage that was marked a grace period ago.

`collection.sweep` finds the garbage, marks and deletes it. Nothing that a writer with a lease needs is ever deleted
(`leases`); docs/concepts/registry-protocol.md has the argument.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from enginesmith.core.errors import ConflictError, IntegrityError
from enginesmith.core.parsing import stamp
from enginesmith.registry import leases
from enginesmith.registry.builds import build_history
from enginesmith.registry.builds.runs import prune, surplus
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.collection.sweep import Garbage, Sweep, find_garbage, hold_claim
from enginesmith.registry.latency_series import models_with_series
from enginesmith.registry.leases import MarkShard, MarkState, read_shards, read_state
from enginesmith.registry.rollouts.reports import clear_gone, next_share
from enginesmith.registry.rollouts.rollout_state import is_reporter
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERIES, lease_key
from enginesmith.registry.versions.channel_state import Channel, change_channel
from enginesmith.registry.versions.channel_writes import refresh_models
from enginesmith.registry.versions.index import heal_index
from enginesmith.registry.versions.lookup import versions

GRACE = timedelta(days=7)
# The reasons for deleting documents without a garbage mark, by kind.
_WHY = {
    "record": "a blob that it names is deleted",
    "series": "its model has no version left",
    "report": "its node has reported nothing for 7 days",
}


@dataclass(frozen=True, slots=True)
class GarbageItem:
    """One item of garbage. name: `model@version`, a digest or a key.  state: 'new' (not marked yet), 'waiting' (until
    `due`), 'due', 'held' (by a lease) or 'deleted'.  size_bytes: of a blob."""

    kind: str
    name: str
    why: str
    size_bytes: int
    state: str
    due: datetime | None = None


@dataclass(frozen=True)
class Collected:
    """The result of a collection. kept: kept version -> reasons.  leases: running writers as text.  acted: whether
    garbage was marked and deleted."""

    items: tuple[GarbageItem, ...]
    kept: Mapping[str, tuple[str, ...]]
    leases: tuple[str, ...]
    acted: bool

    def size_bytes(self, *states: str) -> int:
        """Total size in bytes of the blobs in these states."""
        return sum(garbage_item.size_bytes for garbage_item in self.items if garbage_item.state in states)


def collect(
    store: Store,
    rules: Rules | None = None,
    grace: timedelta = GRACE,
    *,
    delete: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Find garbage; with `delete`, mark new garbage and delete names that were marked more than `grace` ago.

    rules: which versions are kept.  say: called with each name that is deleted.
    Raises ConflictError while another collection runs, IntegrityError for an unreadable channel, lease, kept manifest
    or garbage mark, since these may refer to anything.
    """
    if not delete:
        garbage, mark_state = find_garbage(store, rules or Rules()), read_state(store)
        return _summarize(store, garbage, grace, mark_state, read_shards(store, mark_state.shards))
    with hold_claim(store) as claim:
        sweep = Sweep(claim, rules or Rules(), grace, say)
        garbage = last_garbage = sweep.run()
        if not grace and any(shard.waiting for shard in sweep.shards.values()):
            # Without grace, new marks are due at once; a sweep deletes only names that were marked before it.
            last_garbage = sweep.run()
        _clean_up(sweep, last_garbage)
        claim.release(shard for shard, marks in sweep.shards.items() if marks == MarkShard())
    return _summarize(store, garbage, grace, claim.state, sweep.shards, sweep.gone)


def _clean_up(sweep: Sweep, garbage: Garbage) -> None:
    """Delete documents that only garbage needed, and remains of dead writers: records, series of latencies of models
    without a version, expired leases, build locks, unfinished uploads. Writes the snapshots of the models that such
    leases name, and corrects the index of models."""
    store = sweep.store
    sweep.delete_dead_records(garbage)
    listed_models = {listing.model for listing in garbage.listed}
    for model in models_with_series(store):
        if model not in listed_models and not versions(store, model):
            for key in list(store.list(f"{SERIES}{model}/")):
                store.remove(key)
                sweep.gone[key] = "series"
    now = store.now()
    expired_leases = [lease for lease in leases.list_leases(store) if not lease.is_held(now)]
    remaining_models = [listing.without(sweep.gone) for listing in garbage.listed]
    changed_models = [model for lease in expired_leases for model in lease.changes]
    refresh_models(store, changed_models)
    heal_index(store, remaining_models, changed_models)
    for lease in expired_leases:
        store.remove(lease_key(lease.id))
    build_history.remove_stale_locks(store)
    _tend_reports(sweep, now)
    store.sweep()


def _tend_reports(sweep: Sweep, now: datetime) -> None:
    """Delete the reports of nodes that are gone, and set the share of nodes that report outside of rollouts, so that
    about `rollouts.reports.MOST_REPORTERS` nodes of a channel report."""
    deleted_keys, reporting_nodes = clear_gone(sweep.store, now)
    sweep.gone.update(dict.fromkeys(deleted_keys, "report"))
    for (model, name), nodes in reporting_nodes.items():
        with suppress(ConflictError, IntegrityError):  # `verify` reports a damaged channel
            change_channel(sweep.store, model, name, partial(_with_share, nodes))


def _with_share(nodes: list[str], channel: Channel | None) -> Channel | None:
    """The channel with the next share of nodes that report outside of rollouts. nodes: digests of the names of the
    nodes that reported. None (no change) if the channel is gone or a rollout runs."""
    if channel is None or channel.active_rollout:
        return None
    count = sum(is_reporter(node, channel.reporters_ppm) for node in nodes)
    return replace(channel, reporters_ppm=next_share(channel.reporters_ppm, count))


def _summarize(
    store: Store,
    garbage: Garbage,
    grace: timedelta,
    mark_state: MarkState,
    shards: Mapping[str, MarkShard],
    kinds: Mapping[str, str] | None = None,
) -> Collected:
    """The result of a collection. Also deletes the old runs if it acted. kinds: name -> kind of each deleted name; None
    if it did not act.

    Nothing refers to a run's document, so it needs no tombstone. Its logs are blobs, and become garbage.
    """
    has_deleted, kinds, now = kinds is not None, kinds or {}, store.now()
    marks = {name: mark for shard in shards.values() for name, mark in (*shard.waiting.items(), *shard.going.items())}
    active_leases = [lease for lease in leases.list_leases(store) if lease.is_held(now)]
    oldest_generation = min((lease.seen for lease in active_leases), default=None)
    due_times: dict[datetime, datetime] = {}

    def item(kind: str, name: str, why: str, size: int) -> GarbageItem:
        tombstone = marks.get(name)
        if name in kinds:
            return GarbageItem(kind, name, why, size, "deleted")
        if tombstone is None or not mark_state.counts(tombstone):
            return GarbageItem(kind, name, why, size, "new")
        due_time = due_times.setdefault(tombstone.since, tombstone.since + grace)  # shared by all of its names
        is_blocked = oldest_generation is not None and tombstone.generation > oldest_generation
        return GarbageItem(
            kind, name, why, size, "waiting" if due_time > now else "held" if is_blocked else "due", due_time
        )

    items = [item(*row) for row in garbage.rows()]
    items += [GarbageItem(kind, key, _WHY[kind], 0, "deleted") for key, kind in kinds.items() if kind in _WHY]
    old_runs, run_state = (prune(store), "deleted") if has_deleted else (surplus(store), "due")
    items += [GarbageItem("run", run, "newer runs are kept", 0, run_state) for run in old_runs]
    keep_reasons = {
        f"{model}@{version}": version_reasons for (model, version), version_reasons in garbage.reasons.items()
    }
    running_writers = tuple(f"{lease.what} ({lease.holder}, until {stamp(lease.expires)})" for lease in active_leases)
    return Collected(tuple(items), keep_reasons, running_writers, has_deleted)
