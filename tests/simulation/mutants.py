"""Planted bugs of the registry's protocol: each takes one of its rules away, and the simulation must find it."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

from enginesmith.core.errors import IntegrityError
from enginesmith.exchange import mirror
from enginesmith.registry import leases, registered_specs
from enginesmith.registry.collection import garbage, references
from enginesmith.registry.rollouts.state import Rollout, is_reached
from enginesmith.registry.store import base
from enginesmith.registry.store.layout import ROLLOUTS, lease_key, manifest_key, running_rollout_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_writes, channels, index, lookup, publish, state
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
    return lambda: _all(*(mock.patch.object(owner, name, value) for owner in owners if hasattr(owner, name)))


def _blind_change(part: str) -> Mutant:
    """`change` without a condition of the documents whose keys have this part."""

    def change(store: Any, key: str, make: Any, contains: Any = base.change.__defaults__[0]) -> bytes | None:
        if part not in key:
            return _CHANGE(store, key, make, contains)
        before = store.read(key)
        after: bytes | None = make(before)
        if after is None or after == before:
            return before
        store.replace(key, after, store.read(key))
        return after

    return _everywhere("change", change, base, state)


def _change_with(contains: bool) -> Mutant:
    """`change` that takes every lost answer for one of a write that was done, or was not."""
    return _attribute(state, "change", lambda store, key, make, _=None: _CHANGE(store, key, make, lambda *_: contains))


def _step_counts_as_made() -> AbstractContextManager[Any]:
    """A write that moves no channel, of which the answer was lost, counts as made."""

    def change(store: Any, key: str, make: Any, contains: Any) -> bytes | None:
        seen: list[bytes | None] = []

        def moves(data: bytes | None) -> int:
            return json.loads(data)["moves"] if data else 0

        def noted(data: bytes | None) -> bytes | None:
            seen.append(data)
            made: bytes | None = make(data)
            return made

        def contained(stored: bytes | None, written: bytes) -> bool:
            return moves(seen[-1]) == moves(written) or bool(contains(stored, written))

        return _CHANGE(store, key, noted, contained if "/channels/" in key else contains)

    return mock.patch.object(
        state, "change", lambda store, key, make, contains=_SAME: change(store, key, make, contains)
    )


_SAME = base.change.__defaults__[0]  # type: ignore[index]
_CHANGE = base.change
_FIND_GARBAGE = garbage.find_garbage
_READ_STATE, _UPDATE_STATE = leases.read_state, leases.update_state
_TAKE_LEASE = leases.take_lease
_COPY_VERSION = mirror._copy_version
_POINT = channels.point
_RENEW = garbage.Claim.begin_generation
_SECURE = leases.Guard.secure


def _seen_later(store: Any) -> Any:
    return replace(_READ_STATE(store), generation=10**6)


def _create_over(self: SimulatedStore, key: str, data: bytes) -> bool:
    if not key.endswith("manifest.json"):
        return self.replace(key, data, None)
    return self._write(f"PUT {key}", lambda: self._set(key, data) or True, key, data)


def _take_any(known: Any, names: Any) -> Any:
    going = {name: known.waiting.get(name, mark) for name, mark in names.items()}
    return leases.MarkShard({n: m for n, m in known.waiting.items() if n not in going}, {**known.going, **going})


def _due_at_once(self: Any) -> Any:
    self.grace = -timedelta(days=1)
    return _RUN(self)


_RUN = garbage.Sweep.run
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
            return _UPDATE_STATE(store, lambda known: change(garbage.without_sweeper(known)))
        mine = inspect.getclosurevars(change).nonlocals["self"].sweeper
        return _UPDATE_STATE(store, lambda known: change(replace(known, sweeper=mine)))

    return _attribute(garbage, "update_state", update)


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
    lost = [name for name in names if not guard.store.has(name)] if isinstance(names, dict) else []
    _SECURE(guard, names)
    if lost:
        raise IntegrityError(f"{lost[0]} is not there")


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
    return state.change_channel(store, before.model, before.channel, lambda known: replace(known, rollout=after))


def _serving_anything(serving: Any, manifest: Any, channel: str) -> Any:
    ended = serving.rollout and replace(serving.rollout, state="aborted")
    return _SERVING(replace(serving, rollout=ended), manifest, channel)


def _begin_before_the_mark(guard: Any, model: str, channel: str, make: Any) -> Any:
    def begin(known: Any) -> Any:
        return channel_writes.with_snapshots(guard, replace(known, rollout=make(known)))

    found = state.change_channel(guard.store, model, channel, begin)
    rollout = found.rollout  # type: ignore[union-attr]
    guard.store.create(running_rollout_key(model, channel, rollout.id), b"{}")
    return rollout


def _clear_all_marks(store: Any, model: str, name: str, running: str = "") -> None:
    for _, _, rollout in list(channel_writes._marks(store, f"{ROLLOUTS}{model}/{name}/")):
        store.remove(running_rollout_key(model, name, rollout))


def _clear_unfenced(store: Any, model: str, name: str, running: str = "") -> None:
    found = state.read_channel(store, model, name)
    runs = found.active_rollout if found else None
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
    "a lease is removed before the write": _everywhere("take_lease", _lose_lease, leases, index),
    "a lease counts until its last second": _attribute(leases, "MARGIN", timedelta()),
    "a lease holds nothing that is marked later": _attribute(leases, "read_state", _seen_later),
    "a lease that is over holds garbage": _attribute(leases.Lease, "is_held", lambda *_: True),
    "collections take no notice of leases": _everywhere("list_leases", lambda store: [], leases),
    "leases are read after the references": lambda: _all(
        mock.patch.object(garbage.Sweep, "run", _references_first),
        mock.patch.object(garbage, "find_garbage", lambda _, rules: _FOUND.pop(id(rules))),
    ),
    "what was marked is deleted at once": _attribute(garbage.Sweep, "run", _due_at_once),
    "a mark that was taken away is deleted all the same": _attribute(garbage, "_take", _take_any),
    "a name that is going is taken": _attribute(
        leases.MarkShard,
        "without",
        lambda self, names: replace(self, waiting={k: v for k, v in self.waiting.items() if k not in names}),
    ),
    "a generation is published before its marks": _attribute(garbage.Claim, "begin_generation", _publish_first),
    "a shard is not recorded before it has marks": _attribute(
        garbage.Claim, "begin_generation", lambda self, shards: _RENEW(self, ())
    ),
    "a collection goes on after another took over": _attribute(garbage.Claim, "check", lambda self: None),
    "a collection does not look whether another works": _for_another("hold_claim", with_mine=False),
    "a collection renews the claim of another": _for_another("Claim._write"),
    "a collection releases the claim of another": _for_another("Claim.release"),
    "blobs of a version that stays go": _attribute(
        garbage, "find_garbage", lambda *args: replace(_FIND_GARBAGE(*args), named={})
    ),
    "pinned versions go": _attribute(references._Marking, "keep", _keep_without_pins),
    "versions that only a rollout leads to go": _attribute(references._Marking, "_keep_served", _without_rollouts),
    "versions that a channel serves go": _attribute(references._Marking, "_keep_served", _without_channels),
    "the highest number goes": _attribute(references, "_newest", _only_newest),
    "what a move left goes at once": _attribute(channels, "version_name", lambda *_: "none@0"),
    "what a rollout left goes at once": _attribute(channel_writes, "unmark", lambda *_: None),
    "what was unpinned goes at once": _attribute(registered_specs, "unmark", lambda *_: None),
    "a move is not kept before the next one": _attribute(state, "keep_history", lambda *_: None),
    "a rollout is not kept before the next one": _attribute(state, "_loses", lambda old, new: old.moves != new.moves),
    "a rollback returns to the last move": _attribute(
        state.ChannelHistory, "previous", lambda self: (None, None, *self.moves)[-2]
    ),
    "a step of a rollout is written over another": _everywhere(
        "change_rollout", _change_any_rollout, advance, operations
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
    "missing blobs are not looked for by a verification": _attribute(
        sys.modules[verify.__module__], "check_blobs", lambda *_: None
    ),
    "a mirror writes the manifest before the blobs": _attribute(mirror, "_copy_version", _manifest_first),
    "a step whose answer was lost counts as made": _step_counts_as_made,
    "generations of dead collections count": _attribute(
        garbage, "without_sweeper", lambda known: replace(known, sweeper=None)
    ),
    "marks are dated a day before": _attribute(
        garbage, "Tombstone", lambda since, generation: leases.Tombstone(since - timedelta(days=1), generation)
    ),
    "a version is pinned that is not secured": _attribute(registered_specs, "secure_version", lambda *_: None),
    "a rollout leads nobody": _attribute(state.Channel, "served_to", lambda self, node: self.move),
    "a rollout that was aborted leads nodes": _attribute(
        Rollout, "is_finished", property(lambda self: self.state in ("done", "halted"))
    ),
    "a version takes the number of one that is gone": _attribute(
        publish, "_highest_number", lambda store, model: len(list(lookup.versions(store, model)))
    ),
    "the index is not kept": _everywhere("refresh_index", lambda *_: None, index),
}
