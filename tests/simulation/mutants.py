"""Planted bugs of the registry's protocol: each takes one of its rules away, and the simulation must find it."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import FunctionType
from typing import Any
from unittest import mock

from enginesmith.client.layouts.base import PlainPlace
from enginesmith.client.pull import folder_name
from enginesmith.client.watching.watch import ChannelWatcher
from enginesmith.core import parsing
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError
from enginesmith.exchange import mirror
from enginesmith.registry import gc, leases, registered_specs
from enginesmith.registry.collection import references, sweep
from enginesmith.registry.rollouts.rollout_state import Rollout, is_reached
from enginesmith.registry.store import base
from enginesmith.registry.store.layout import ROLLOUTS, lease_key, manifest_key, running_rollout_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, channel_writes, channels, index, lookup, publish
from pipeline.rollout import advance, operations
from tests.simulation.store import SimulatedStore

Mutant = Callable[[], AbstractContextManager[Any]]


def _attribute(owner: object, name: str, value: object) -> Mutant:
    return lambda: mock.patch.object(owner, name, value)


@contextmanager
def _all(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    if not patches:
        yield
        return
    with patches[0], _all(*patches[1:]):
        yield


def _everywhere(name: str, value: object, *owners: object) -> Mutant:
    return lambda: _all(*(mock.patch.object(owner, name, value) for owner in owners))


def _blind_change(part: str) -> Mutant:
    """`change` without a condition of the documents whose keys have this part."""

    def change(store: Any, key: str, make: Any, contains: Any = base.change.__defaults__[0]) -> bytes | None:
        if part not in key:
            return _CHANGE(store, key, make, contains)
        content_before = store.read(key)
        after: bytes | None = make(content_before)
        if after is None or after == content_before:
            return content_before
        store.replace(key, after, store.read(key))
        return after

    return _everywhere("change", change, base, channel_state)


def _change_with(contains: bool) -> Mutant:
    """`change` that takes every lost answer for one of a write that was done, or was not."""
    return _attribute(
        channel_state, "change", lambda store, key, make, _=None: _CHANGE(store, key, make, lambda *_: contains)
    )


def _counts_as_made(*fields: str) -> Mutant:
    """A write that leaves these fields of a channel as they were, and whose answer was lost, counts as made."""

    def change(store: Any, key: str, make: Any, contains: Any) -> bytes | None:
        seen_data: list[bytes | None] = []

        def values(data: bytes | None) -> list[object]:
            document = json.loads(data) if data else {}
            return [document.get(field) for field in fields]

        def noted(data: bytes | None) -> bytes | None:
            seen_data.append(data)
            new_data: bytes | None = make(data)
            return new_data

        def contained(stored: bytes | None, written: bytes) -> bool:
            return values(seen_data[-1]) == values(written) or bool(contains(stored, written))

        return _CHANGE(store, key, noted, contained if "/channels/" in key else contains)

    return _attribute(
        channel_state, "change", lambda store, key, make, contains=_SAME: change(store, key, make, contains)
    )


_SAME = base.change.__defaults__[0]  # type: ignore[index]
_CHANGE = base.change
_FIND_GARBAGE = sweep.find_garbage
_READ_STATE, _UPDATE_STATE = leases.read_state, leases.update_state
_TAKE_LEASE, _TOMBSTONE = leases.take_lease, leases.Tombstone
_COPY_VERSION, _POINT = mirror._copy_version, channels.point
_RENEW = sweep.Claim.begin_generation
_SECURE = leases.Guard.secure


def _seen_later(store: Any) -> Any:
    return replace(_READ_STATE(store), generation=10**6)


def _create_over(self: SimulatedStore, key: str, data: bytes) -> bool:
    if not key.endswith("manifest.json"):
        return self.replace(key, data, None)
    return self._write(f"PUT {key}", lambda: self._set(key, data) or True, key, data)


def _take_any(state: Any, names: Any) -> Any:
    going = {name: state.waiting.get(name, mark) for name, mark in names.items()}
    return leases.MarkShard({n: m for n, m in state.waiting.items() if n not in going}, {**state.going, **going})


def _due_at_once(self: Any) -> Any:
    self.grace = -timedelta(days=1)
    return _RUN(self)


_RUN = sweep.Sweep.run
_FOUND: dict[int, Any] = {}


def _references_first(self: Any) -> Any:
    _FOUND[id(self.rules)] = _FIND_GARBAGE(self.store, self.rules)
    return _RUN(self)


def _for_another(work: str, *, with_mine: bool = True) -> Mutant:
    """The claim as if it were that of the collection that writes it, in one of its functions."""

    def update(store: Any, change: Any) -> Any:
        if not change.__qualname__.startswith(work):
            return _UPDATE_STATE(store, change)
        if not with_mine:
            return _UPDATE_STATE(store, lambda state: change(sweep.without_sweeper(state)))
        own_sweeper = inspect.getclosurevars(change).nonlocals["self"].sweeper
        return _UPDATE_STATE(store, lambda state: change(replace(state, sweeper=own_sweeper)))

    return _attribute(leases, "update_state", update)


def _publish_first(self: Any, shards: Any) -> Any:
    generation = _RENEW(self, shards)
    self.publish_generation()
    return generation


def _end_any(*args: Any, ending: Any = None, **options: Any) -> Any:
    return _POINT(*args, ending=ending and (mock.ANY, ending[1]), **options)


def _manifest_first(source: Any, manifest: Any, guard: Any, *rest: Any) -> None:
    key = manifest_key(manifest.model, manifest.version)
    guard.store.create(key, source.read(key))
    _COPY_VERSION(source, manifest, guard, *rest)


def _look_before(guard: Any, names: Iterable[str]) -> None:
    lost_names = [name for name in names if not guard.store.has(name)] if isinstance(names, dict) else []
    _SECURE(guard, names)
    if lost_names:
        raise IntegrityError(f"{lost_names[0]} is not there")


def _lose_lease(store: Any, *rest: Any) -> Any:
    lease = _TAKE_LEASE(store, *rest)
    store.remove(lease_key(lease.id))
    return lease


def _keep_without_pins(self: Any, version: Any, why: str) -> None:
    if why != "pinned":
        _KEEP(self, version, why)


def _without_rollouts(self: Any, state: Any, *rest: Any) -> None:
    _KEEP_SERVED(self, replace(state, rollout=None), *rest)


def _without_channels(self: Any, state: Any, history: Any, moves: int) -> None:
    if state.active_rollout:
        self.keep((state.model, state.active_rollout.version), "rollout")


def _change_any_rollout(store: Any, before: Any, after: Any) -> Any:
    return channel_state.change_channel(
        store, before.model, before.channel, lambda state: replace(state, rollout=after)
    )


def _serving_anything(serving: Any, manifest: Any, channel: str) -> Any:
    ended_rollout = serving.rollout and replace(serving.rollout, state="aborted")
    return _SERVING(replace(serving, rollout=ended_rollout), manifest, channel) and serving


def _begin_before_the_mark(guard: Any, model: str, channel: str, make: Any) -> Any:
    def begin(state: Any) -> Any:
        return channel_writes.with_snapshots(guard, replace(state, rollout=make(state)))

    channel_now = channel_state.change_channel(guard.store, model, channel, begin)
    rollout = channel_now.rollout  # type: ignore[union-attr]
    guard.store.create(running_rollout_key(model, channel, rollout.id), b"{}")
    return rollout


def _clear_all_marks(store: Any, model: str, name: str, running: str = "") -> None:
    for _, _, rollout in list(channel_writes._marks(store, f"{ROLLOUTS}{model}/{name}/")):
        store.remove(running_rollout_key(model, name, rollout))


def _clear_unfenced(store: Any, model: str, name: str, running: str = "") -> None:
    channel_now = channel_state.read_channel(store, model, name)
    runs = channel_now.active_rollout if channel_now else None
    for _, _, rollout in list(channel_writes._marks(store, f"{ROLLOUTS}{model}/{name}/")):
        if runs is None or runs.id != rollout:
            store.remove(running_rollout_key(model, name, rollout))


_KEEP, _KEEP_SERVED = references._Marking.keep, references._Marking._keep_served
_SERVING = operations._serving


def _secure_nothing(guard: Any, names: Iterable[str]) -> None:
    list(names)


def _only_newest(versions: list[str], count: int) -> set[str]:
    return set(sorted(versions, key=lookup.version_order)[max(0, len(versions) - count) :])


def _snapshots_with(**methods: Any) -> Mutant:
    """Snapshots that are written with other methods of the guard."""
    guard_class = type("Guard", (leases.Guard,), methods)

    def write(guard: Any, channel: Any) -> Any:
        return _WITH_SNAPSHOTS(guard_class(guard.store, guard.lease, guard.begun), channel)

    return _everywhere("with_snapshots", write, channels, channel_writes)


def _secure_unlike(guard: Any, names: Iterable[str]) -> None:
    leases.unmark(guard.store, names)


_WITH_SNAPSHOTS = channel_writes.with_snapshots


def _with(function: Any, **names: object) -> Any:
    """A function with other functions below these names."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LateGuard(leases.Guard):
    def __post_init__(self) -> None:
        object.__setattr__(self, "begun", parsing.steady_s())


def _write_late(self: Any, *args: Any, **options: Any) -> None:
    _WRITE(self, *args, **options)
    self.begun = parsing.steady_s()


def _ends_with(end: Callable[[Any, Any, Callable[[], None]], None], *, may_stay: bool = True) -> Mutant:
    """`hold_change` that ends in another way, which is given what removes the lease."""

    @contextmanager
    def hold(store: Any, models: Any, what: str, lasts: Any = leases.PUBLISHING) -> Iterator[Any]:
        start_s, names = parsing.steady_s(), tuple(sorted(set(models)))
        lease = leases.take_lease(store, what, lasts, names)
        try:
            yield leases.Guard(store, lease, start_s)
        finally:
            with suppress(EnginesmithError):
                is_stays = isinstance(sys.exception(), UnavailableError)
                end(store, names, lambda: None if is_stays and may_stay else store.remove(lease_key(lease.id)))

    return _everywhere("hold_change", hold, index, channels, publish, mirror)


def _remove_first(store: Any, names: Any, remove: Callable[[], None]) -> None:
    remove()
    index.refresh_index(store, names)


def _remove_always(store: Any, names: Any, remove: Callable[[], None]) -> None:
    with suppress(EnginesmithError):
        index.refresh_index(store, names)
    remove()


def _refresh_and_remove(store: Any, names: Any, remove: Callable[[], None]) -> None:
    index.refresh_index(store, names)
    remove()


def _heal_unheld(store: Any, *args: Any) -> Any:
    for lease in leases.list_leases(store):
        if not lease.is_held(store.now()):
            store.remove(lease_key(lease.id))
    return _HEAL(store, *args)


def _heal_as_seen(store: Any, models: Any, *_: Any) -> None:
    for item in models:
        _write_entries(store, index.index_key(index._shard_of(item.model)), {item.model: item})


def _refresh_once(store: Any, key: str, models: list[str]) -> None:
    _write_entries(store, key, {item.model: item for item in index._look(store, models)})


def _write_entries(store: Any, key: str, entries: Any) -> None:
    def make(data: bytes | None) -> bytes | None:
        return data and (index._parse(data) or index.IndexShard()).updated(entries).to_bytes()

    base.change(store, key, make)


def _index_first(store: Any) -> Any:
    listed_leases = _with(_READ_INDEX, list_leases=lambda _: [])(store)
    changing = sorted({model for lease in leases.list_leases(store) for model in lease.changes})
    return listed_leases and [*{item.model: item for item in (*listed_leases, *index._look(store, changing))}.values()]


def _seen_before_the_index(store: Any) -> None:
    models = index.look_at(store, lookup.catalogue(store))
    _with(_MAKE_INDEX, look_at=lambda *_: models)(store)


def _refresh_as_read(guard: Any, model: str, channel: str) -> None:
    current_channel = channel_state.read_channel(guard.store, model, channel)
    if current_channel:
        fresh_snapshots = channel_writes.with_snapshots(guard, current_channel).snapshots
        channel_state.change_channel(
            guard.store,
            model,
            channel,
            lambda state: replace(state, snapshots=fresh_snapshots) if state.move == current_channel.move else None,
        )


def _lead_noted(self: Any, channel: Any, locator: Any) -> bool:
    self.read = channel
    return _LEADS(self, channel, locator)


def _serve_noted(self: Any, *args: Any) -> Any:
    self._followed = self.read
    return _SERVE(self, *args)


def _read_then_tag(self: SimulatedStore, key: str, tag: str) -> tuple[bytes | None, str]:
    data = self.read(key)
    return _READ_IF_CHANGED(self, key, tag) if data is None else (data, _READ_IF_CHANGED(self, key, "")[1])


def _point_first(self: Any, store: Any, located: Any, resolution: Any, fetcher: Any) -> Any:
    self._point_to(folder_name(located, resolution.chosen))
    return _DOWNLOAD(self, store, located, resolution, fetcher)


def _copy_unsecured(source: Any, manifest: Any, guard: Any, *rest: Any) -> None:
    _COPY_VERSION(source, manifest, type("Guard", (leases.Guard,), {"secure": _secure_nothing})(**vars(guard)), *rest)


def _unmark_first(store: Any, model: str, versions: list[str]) -> None:
    """Before the write of the state, and not after it, by which of its callers asks."""
    if sys._getframe(1).f_code.co_name == "write":
        leases.unmark(store, [leases.version_name(model, version) for version in versions])


@contextmanager
def _lease_not_held(store: Any, what: str) -> Iterator[Any]:
    yield leases.Guard(store, leases.Lease("0", what, "", store.now(), store.now() + leases.PUBLISHING, 0), 1e12)


@contextmanager
def _hold_unsecured(store: Any, models: Any, what: str, lasts: Any = leases.PUBLISHING) -> Iterator[Any]:
    with index.hold_change(store, models, what, lasts) as guard:
        bare_guard = type("Guard", (leases.Guard,), {"secure": _secure_nothing})(**vars(guard))
        yield bare_guard if what.startswith("attaching") else guard


_CLEAR_REPORTS = operations.clear_reports
_WRITE, _HEAL, _READ_INDEX, _MAKE_INDEX = sweep.Claim._write, index.heal_index, index.read_index, index.make_index
_LEADS, _SERVE, _DOWNLOAD = ChannelWatcher._leads_as_before, ChannelWatcher._serve, PlainPlace._download
_READ_IF_CHANGED = SimulatedStore.read_if_changed
_VERIFY = sys.modules[verify.__module__]

MUTANTS: dict[str, Mutant] = {
    "a channel is written whatever it says by now": _blind_change("/channels/"),
    "a history is written whatever it says by now": _blind_change("/histories/"),
    "marks are written whatever they say by now": _blind_change("gc/marks/"),
    "the claim is written whatever it says by now": _blind_change("gc/state"),
    "the index is written whatever it says by now": _blind_change("index/"),
    "a move whose answer was lost is made again": _change_with(False),
    "a move whose answer was lost counts as made": _change_with(True),
    "a manifest is written over one of the same number": _attribute(SimulatedStore, "create", _create_over),
    "a version is published again": _attribute(publish, "_recent", lambda *_: None),
    "marks are not taken away": _attribute(leases.Guard, "secure", _secure_nothing),
    "marks are taken away after blobs were looked for": lambda: _all(
        mock.patch.object(leases.Guard, "secure", _look_before),
        mock.patch.object(publish, "find_lost_of", lambda *_: {}),
    ),
    "a lease that is over still counts for its holder": _attribute(leases.Guard, "check", lambda _: None),
    "a lease that is over counts for a manifest": _attribute(leases.Guard, "secure", _secure_unlike),
    "a lease that is over counts for a channel": _snapshots_with(check=lambda _: None, secure=_secure_unlike),
    "a lease is removed before the write": _attribute(leases, "take_lease", _lose_lease),
    "a lease counts until its last second": _attribute(leases, "MARGIN", timedelta()),
    "a lease holds nothing that is marked later": _attribute(leases, "read_state", _seen_later),
    "a lease that is over holds garbage": _attribute(leases.Lease, "is_held", lambda *_: True),
    "collections take no notice of leases": _everywhere("list_leases", lambda store: [], leases),
    "leases are read after the references": lambda: _all(
        mock.patch.object(sweep.Sweep, "run", _references_first),
        mock.patch.object(sweep, "find_garbage", lambda _, rules: _FOUND.pop(id(rules))),
    ),
    "what was marked is deleted at once": _attribute(sweep.Sweep, "run", _due_at_once),
    "a mark that was taken away is deleted all the same": _attribute(sweep, "_take", _take_any),
    "a name that is going is taken": _attribute(
        leases.MarkShard,
        "without",
        lambda self, names: replace(self, waiting={k: v for k, v in self.waiting.items() if k not in names}),
    ),
    "a generation is published before its marks": _attribute(sweep.Claim, "begin_generation", _publish_first),
    "a shard is not recorded before it has marks": _attribute(
        sweep.Claim, "begin_generation", lambda self, shards: _RENEW(self, ())
    ),
    "a collection goes on after another took over": _attribute(sweep.Claim, "check", lambda self: None),
    "a collection does not look whether another works": _for_another("hold_claim", with_mine=False),
    "a collection renews the claim of another": _for_another("Claim._write"),
    "a collection releases the claim of another": _for_another("Claim.release"),
    "blobs of a version that stays go": _attribute(
        sweep, "find_garbage", lambda *args: replace(_FIND_GARBAGE(*args), named={})
    ),
    "pinned versions go": _attribute(references._Marking, "keep", _keep_without_pins),
    "versions that only a rollout leads to go": _attribute(references._Marking, "_keep_served", _without_rollouts),
    "versions that a channel serves go": _attribute(references._Marking, "_keep_served", _without_channels),
    "the highest number goes": _attribute(references, "_newest", _only_newest),
    "what a channel led to goes at once": _attribute(channel_state, "unmark_versions", lambda *_: None),
    "what a slow move left goes too soon": _attribute(channel_state, "unmark_versions", _unmark_first),
    "what was unpinned goes at once": _attribute(registered_specs, "unmark", lambda *_: None),
    "a move is not kept before the next one": _attribute(channel_state, "keep_history", lambda *_: None),
    "a rollout is not kept before the next one": _attribute(
        channel_state, "_loses", lambda old, new: old.moves != new.moves
    ),
    "a rollback returns to the last move": _attribute(
        channel_state.ChannelHistory, "previous", lambda self: (None, None, *self.moves)[-2]
    ),
    "a step of a rollout is written over another": _everywhere(
        "change_rollout", _change_any_rollout, advance, operations
    ),
    "a move starts from another state than was seen": _everywhere(
        "check_unmoved", lambda *_: None, channels, channel_state
    ),
    "a rollout begins while another runs": _attribute(operations, "_serving", _serving_anything),
    "a promotion ends whatever rollout there is": _attribute(channels, "point", _end_any),
    "a move does not end the rollout": _attribute(channels, "_end_rollout", lambda rollout, move: rollout),
    "a rollout is marked after it began": _attribute(operations, "begin_rollout", _begin_before_the_mark),
    "a rollout that is over leads nodes": _attribute(
        Rollout, "serves", lambda self, node: is_reached(node, self.id, self.reach)
    ),
    "nodes that fail do not halt a rollout": _attribute(
        advance, "_health", lambda *_: advance.GateResult("health", "pass", "")
    ),
    "the mark of a rollout that runs is removed": _everywhere(
        "clear_marks", _clear_all_marks, channel_writes, advance, operations
    ),
    "a mark is removed while its rollout begins": _everywhere(
        "clear_marks", _clear_unfenced, channel_writes, advance, operations
    ),
    "a wave ends by the clock of its controller": _attribute(SimulatedStore, "now", lambda self: self.world.now()),
    "a version is promoted that is not secured": _attribute(channels, "secure_version", lambda *_: None),
    "a snapshot is not secured": _snapshots_with(secure=_secure_nothing),
    "missing blobs are not looked for before a publication": _attribute(publish, "find_lost_of", lambda *_: {}),
    "missing blobs are not looked for before a promotion": _attribute(channels, "find_lost_of", lambda *_: {}),
    "missing blobs are not looked for by a verification": _attribute(_VERIFY, "check_blobs", lambda *_: None),
    "a mirror writes the manifest before the blobs": _attribute(mirror, "_copy_version", _manifest_first),
    "a step whose answer was lost counts as made": _counts_as_made("moves"),
    "a snapshot whose answer was lost counts as written": _counts_as_made("moves", "rollout"),
    "generations of dead collections count": _attribute(
        sweep, "without_sweeper", lambda state: replace(state, sweeper=None)
    ),
    "marks are dated a day before": _attribute(
        leases, "Tombstone", lambda since, generation: _TOMBSTONE(since - timedelta(days=1), generation)
    ),
    "a version is pinned that is not secured": _attribute(registered_specs, "secure_version", lambda *_: None),
    "a rollout leads nobody": _attribute(channel_state.Channel, "served_to", lambda self, node: self.move),
    "a rollout that was aborted leads nodes": _attribute(
        Rollout, "is_finished", property(lambda self: self.state in ("done", "halted"))
    ),
    "a version takes the number of one that is gone": _attribute(
        publish, "_highest_number", lambda store, model: len(list(lookup.versions(store, model)))
    ),
    "the index is not kept": _everywhere("refresh_index", lambda *_: None, index),
    "a lease counts from when it was written": _everywhere("Guard", _LateGuard, leases, index),
    "a claim counts from when it was written": _attribute(sweep.Claim, "_write", _write_late),
    "a lease has seen generations that are not published": _attribute(
        leases, "read_state", lambda store: replace(state := _READ_STATE(store), generation=state.latest)
    ),
    "a collection judges leases by its own clock": _attribute(
        leases.Lease, "is_held", lambda self, _: datetime.now(UTC) < self.expires
    ),
    "a lease is removed before the index has its change": _ends_with(_remove_first),
    "a lease is removed though the index has not its change": _ends_with(_remove_always),
    "a lease is removed though evidence is in no snapshot": _ends_with(_refresh_and_remove, may_stay=False),
    "leases that are over are removed before the index is mended": _attribute(gc, "heal_index", _heal_unheld),
    "snapshots of dead writers are not mended": _attribute(gc, "refresh_models", lambda *_: None),
    "the index gets what a collection saw": _attribute(gc, "heal_index", _heal_as_seen),
    "an entry of the index is looked at once": _attribute(index, "_refresh", _refresh_once),
    "a list reads the leases after the index": _attribute(index, "read_index", _index_first),
    "an index is made of what was there before it": _attribute(index, "make_index", _seen_before_the_index),
    "snapshots are those of documents that were read once": _attribute(
        channel_writes, "refresh_channel", _refresh_as_read
    ),
    "evidence comes into no snapshot": _attribute(publish, "refresh_version", lambda *_: None),
    "a watcher notes a state before it has its engine": lambda: _all(
        mock.patch.object(ChannelWatcher, "_leads_as_before", _lead_noted),
        mock.patch.object(ChannelWatcher, "_serve", _serve_noted),
    ),
    "a watcher follows moves and no rollout": _attribute(
        ChannelWatcher,
        "_leads_as_before",
        lambda self, channel, _: self._followed is not None and self._followed.move == channel.move,
    ),
    "the tag of a document is read after it": _attribute(SimulatedStore, "read_if_changed", _read_then_tag),
    "a folder leads to an engine before it is there": _attribute(PlainPlace, "_download", _point_first),
    "a mirror secures nothing": _attribute(mirror, "_copy_version", _copy_unsecured),
    "a blob that was stored again is set aside": _attribute(SimulatedStore, "is_sound", lambda *_: False),
    "an attachment is not secured": _attribute(publish, "hold_change", _hold_unsecured),
    "graphs of an ensemble are not secured": _everywhere("secure_graphs", lambda *_: None, leases, publish),
    "graphs of an ensemble go": _attribute(references._Marking, "_read_graphs", lambda *_: None),
    "graphs of an ensemble go before it": _attribute(sweep, "_list_graphs", lambda *_: []),
    "what a rollback leads to goes": _attribute(
        references._Marking,
        "_keep_served",
        lambda self, channel, history, moves: _KEEP_SERVED(
            self, channel, replace(history, moves=history.moves[-1:]), moves
        ),
    ),
    "reports of the rollout that runs are cleared": _attribute(
        operations,
        "clear_reports",
        lambda store, running, _: _CLEAR_REPORTS(store, gone := replace(running, id="0"), lambda: gone),
    ),
    "the index keeps versions that are gone": _attribute(index.ListedModel, "without", lambda self, _: self),
    "a repair holds no lease": _attribute(_VERIFY, "hold_lease", _lease_not_held),
}
