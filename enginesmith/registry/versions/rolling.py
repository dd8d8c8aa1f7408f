"""Reads and changes the rollout in a channel's state, and finds the rollouts that may be unfinished.

A document under `rollouts/` marks such a rollout, so that a controller of ten thousand models lists those alone. It is
written before the rollout begins, by an id that only this attempt has, and removed when the rollout has ended: a writer
that is killed leaves a mark too many, which the next look removes (`clear_marks`).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from enginesmith.core.digest import canonical_json
from enginesmith.core.errors import ConflictError, EnginesmithError, IntegrityError
from enginesmith.core.names import is_name
from enginesmith.registry.leases import Guard, version_name
from enginesmith.registry.marks import unmark
from enginesmith.registry.rollouts.state import Rollout
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import ROLLOUTS, running_rollout_key
from enginesmith.registry.versions.refresh import with_snapshots
from enginesmith.registry.versions.state import Channel, change_channel, read_channel


def read_rollout(store: Documents, model: str, channel: str) -> Rollout | None:
    """The rollout of a channel, which may be finished; None where there never was one. Raises as `read_channel`."""
    found = read_channel(store, model, channel)
    return found.rollout if found else None


def begin_rollout(guard: Guard, model: str, channel: str, make: Callable[[Channel | None], Rollout]) -> Rollout:
    """Write the rollout that `make` returns for a channel's state, and return it. `make` is called again after a lost
    race, and gives another id each time. Raises what it raises, and as `change_channel`."""
    store = guard.store

    def begin(state: Channel | None) -> Channel | None:
        rollout = make(state)
        if state is None:
            return None
        store.create(running_rollout_key(model, channel, rollout.id), canonical_json({"rollout": rollout.id}))
        return with_snapshots(guard, replace(state, rollout=rollout))

    found = change_channel(store, model, channel, begin)
    if found is None or found.rollout is None:
        raise ConflictError(f"channel {model}:{channel} was deleted at the same time; start again")
    return found.rollout


def change_rollout(store: Store, before: Rollout, after: Rollout) -> Channel:
    """Replace a rollout in its channel's state, and return the new state. One write, which is what nodes read.

    Raises ConflictError, with what the other writer did, where one was faster.
    """
    if after.is_finished:  # see `channels._move`; a mark that cannot be removed must not keep a rollout from its end
        with suppress(ConflictError, IntegrityError):
            unmark(store, [version_name(before.model, before.version)])

    def make(state: Channel | None) -> Channel | None:
        if state is None or state.rollout != before:
            raise ConflictError(_describe_change(before, state))
        changed = replace(state, rollout=after)
        return replace(changed, snapshots={k: v for k, v in state.snapshots.items() if k in changed.served})

    found = change_channel(store, before.model, before.channel, make)
    if found is None:
        raise ConflictError(_describe_change(before, None))
    return found


def _describe_change(before: Rollout, state: Channel | None) -> str:
    last = state.rollout.history[-1] if state and state.rollout else None
    told = f"{last.what} by {last.by or '?'}" if last else "deleted"
    return (
        f"the rollout of {before.where} was changed at the same time ({told}); look at `enginesmith rollout status "
        f"{before.where}`, and decide again"
    )


def running_rollouts(store: Documents) -> list[tuple[str, str]]:
    """Model and channel of each rollout that may be unfinished, sorted; one list of keys."""
    return sorted({where[:2] for where in _marks(store, ROLLOUTS)})


def clear_marks(store: Store, model: str, name: str) -> None:
    """Remove the marks of a channel's rollouts that do not run. What cannot be removed is left to the next look: a mark
    too many costs a look, and leads nobody.

    A mark may be of a rollout that is about to begin. So the state is written anew first: who read it before begins
    nothing with that id any more.
    """
    with suppress(EnginesmithError):
        for _, _, rollout in list(_marks(store, f"{ROLLOUTS}{model}/{name}/")):
            if not _runs(store, model, name, rollout):
                store.remove(running_rollout_key(model, name, rollout))


def _runs(store: Store, model: str, name: str, rollout: str) -> bool:
    """Whether a channel's rollout of this id runs; where not, it will not begin any more."""
    runs = False

    def fence(state: Channel | None) -> Channel | None:
        nonlocal runs
        last = state.rollout if state else None
        runs = last is not None and last.id == rollout and not last.is_finished
        begun = state is None or (last is not None and last.id == rollout)
        return None if state is None or begun else replace(state, revision=state.revision + 1)

    change_channel(store, model, name, fence)
    return runs


def _marks(store: Documents, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Model, channel and id of each mark."""
    for key in store.list(prefix):
        match key.removeprefix(ROLLOUTS).removesuffix(".json").split("/"):
            case [model, channel, rollout] if all(map(is_name, (model, channel, rollout))):
                yield model, channel, rollout
