"""Planted bugs of the registry's protocol: each takes one of its rules away, and the simulation must find it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

from enginesmith.registry import leases
from enginesmith.registry import leases as marks
from enginesmith.registry.collection import garbage, references
from enginesmith.registry.collection import garbage as claim
from enginesmith.registry.collection import garbage as sweep
from enginesmith.registry.store import base
from enginesmith.registry.store.layout import ROLLOUTS, running_rollout_key
from enginesmith.registry.versions import channel_writes, channels, lookup, publish, state
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


def _blind_change(store: Any, key: str, make: Any, contains: Any = None) -> bytes | None:
    before = store.read(key)
    after: bytes | None = make(before)
    if after is None or after == before:
        return before
    store.replace(key, after, store.read(key))
    return after


def _change_again(store: Any, key: str, make: Any, contains: Any = None) -> bytes | None:
    """`change` that repeats a write whose answer was lost."""
    return _CHANGE(store, key, make, lambda found, written: False)


_CHANGE = base.change
_SECURE_VERSION = leases.secure_version
_NEWEST = references._newest
_FIND_GARBAGE = garbage.find_garbage
_FIND_SERVED = references.find_served_versions


def _seen_later(store: Any) -> Any:
    return replace(marks.read_state(store), generation=10**6)


def _create_over(self: SimulatedStore, key: str, data: bytes) -> bool:
    return (
        self.replace(key, data, self.content.objects.get(key))
        if key.endswith("manifest.json")
        else self.replace(key, data, None)
    )


def _take_any(known: Any, names: Any) -> Any:
    going = {name: known.waiting.get(name, mark) for name, mark in names.items()}
    return marks.MarkShard({n: m for n, m in known.waiting.items() if n not in going}, {**known.going, **going})


def _due_at_once(self: Any) -> Any:
    self.grace = -timedelta(days=1)
    return _RUN(self)


_RUN = sweep.Sweep.run


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


def _no_lease(guard: Any, names: Iterable[str]) -> None:
    marks.unmark(guard.store, names)


def _secure_nothing(guard: Any, names: Iterable[str]) -> None:
    list(names)


def _only_newest(versions: list[str], count: int) -> set[str]:
    return set(sorted(versions, key=lookup.version_order)[max(0, len(versions) - count) :])


class _Unsecured(leases.Guard):
    def secure(self, names: Iterable[str]) -> None:
        list(names)


def _snapshots_unsecured(guard: Any, channel: Any) -> Any:
    return _WITH_SNAPSHOTS(_Unsecured(guard.store, guard.lease), channel)


def _claim_over(store: Any, change: Any) -> Any:
    if change.__qualname__.startswith("hold_claim"):
        return marks.update_state(store, lambda known: change(claim.without_sweeper(known)))
    return marks.update_state(store, change)


_WITH_SNAPSHOTS = channel_writes.with_snapshots

MUTANTS: dict[str, Mutant] = {
    "a document is written whatever it says by now": _everywhere("change", _blind_change, base, state),
    "a move whose answer was lost is made again": _everywhere("change", _change_again, state),
    "a manifest is written over one of the same number": _attribute(SimulatedStore, "create", _create_over),
    "marks are not taken away": _attribute(leases.Guard, "secure", _secure_nothing),
    "a lease that is over still counts for its holder": _attribute(leases.Guard, "secure", _no_lease),
    "a lease holds nothing that is marked later": _attribute(leases, "read_state", _seen_later),
    "collections take no notice of leases": _everywhere("list_leases", lambda store: [], leases),
    "what was marked is deleted at once": _attribute(sweep.Sweep, "run", _due_at_once),
    "a mark that was taken away is deleted all the same": _attribute(sweep, "_take", _take_any),
    "a collection goes on after another took over": _attribute(claim.Claim, "check", lambda self: None),
    "a collection does not look whether another works": _attribute(claim, "update_state", _claim_over),
    "pinned versions go": _attribute(references._Marking, "keep", _keep_without_pins),
    "versions that only a rollout leads to go": _attribute(references._Marking, "_keep_served", _without_rollouts),
    "versions that a channel serves go": _attribute(references._Marking, "_keep_served", _without_channels),
    "the highest number goes": _attribute(references, "_newest", _only_newest),
    "a move is not kept before the next one": _attribute(state, "keep_history", lambda *_: None),
    "a step of a rollout is written over another": _everywhere(
        "change_rollout", _change_any_rollout, advance, operations
    ),
    "a rollout begins while another runs": _attribute(operations, "_serving", _serving_anything),
    "a move does not end the rollout": _attribute(channels, "_end_rollout", lambda rollout, move: rollout),
    "a rollout is marked after it began": _attribute(operations, "begin_rollout", _begin_before_the_mark),
    "the mark of a rollout that runs is removed": _everywhere(
        "clear_marks", _clear_all_marks, channel_writes, advance, operations
    ),
    "a mark is removed while its rollout begins": _everywhere(
        "clear_marks", _clear_unfenced, channel_writes, advance, operations
    ),
    "a wave ends by the clock of its controller": _attribute(SimulatedStore, "now", lambda self: self.world.now()),
    "a version is promoted that is not secured": _attribute(channels, "secure_version", lambda *_: None),
    "a snapshot is not secured": _everywhere("with_snapshots", _snapshots_unsecured, channels, channel_writes),
    "missing blobs are not looked for": _everywhere("find_lost_of", lambda *_: {}, publish, channels),
}
