"""The claim of a collection: one works on a registry at a time, and marks under a generation of its own.

A thread renews it while the collection works, so that one that was killed holds up the next for minutes.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Lock

from enginesmith.core import moments
from enginesmith.core.errors import ConflictError, EnginesmithError
from enginesmith.registry import leases
from enginesmith.registry.marks import MarkState, Sweeper, update_state
from enginesmith.registry.store.base import Store

# A collection that did not renew its claim for so long, by the store's clock, counts as dead.
SWEEPING = timedelta(minutes=8)
RENEW_S = 60.0


@dataclass
class Claim:
    """The claim of this process. state: the marks' state when it was last written.  begun: of `steady_s`, before the
    store was asked for the time that this write is of."""

    store: Store
    sweeper: Sweeper
    state: MarkState
    begun: float
    _lock: Lock = field(default_factory=Lock)

    def renew(self) -> None:
        """Renew the claim. Raises ConflictError when another collection took it."""
        self._write(lambda known: known)

    def check(self) -> None:
        """Raise ConflictError if another collection may count this one as dead; asked before each deletion."""
        if moments.steady_s() > leases.end_of(self.begun, SWEEPING):
            raise ConflictError("this collection stood still so long that another may count it as dead; run it again")

    def begin_generation(self, shards: Iterable[str]) -> int:
        """Take a generation for new marks in these shards, and return it. Called before the first is written."""

        def change(known: MarkState) -> MarkState:
            return replace(known, latest=known.latest + 1, shards=tuple(sorted({*known.shards, *shards})))

        self._write(change, own_generation=True)
        return self.sweeper.generation

    def publish_generation(self) -> None:
        """Have the marks of this generation count. Called when all of them are written."""
        self._write(lambda known: replace(known, generation=self.sweeper.generation))

    def release(self, empty: Iterable[str]) -> None:
        """Give the claim back. empty: shards that hold no mark any more."""

        def change(known: MarkState) -> MarkState:
            if known.sweeper is None or known.sweeper.id != self.sweeper.id:
                return known
            shards = tuple(shard for shard in known.shards if shard not in set(empty))
            return replace(without_sweeper(known), shards=shards)

        update_state(self.store, change)

    def _write(self, change: Callable[[MarkState], MarkState], *, own_generation: bool = False) -> None:
        def make(known: MarkState) -> MarkState:
            if known.sweeper is None or known.sweeper.id != self.sweeper.id:
                raise ConflictError("another collection counted this one as dead and took over; run it again")
            after = change(known)
            generation = after.latest if own_generation else known.sweeper.generation
            return replace(after, sweeper=replace(known.sweeper, expires=now + SWEEPING, generation=generation))

        with self._lock:
            begun, now = moments.steady_s(), self.store.now()
            self.state = update_state(self.store, make)
            self.sweeper, self.begun = self.state.sweeper or self.sweeper, begun


def without_sweeper(state: MarkState) -> MarkState:
    """The state when a collection ended or died; a generation that it did not publish is abandoned."""
    generation = state.sweeper.generation if state.sweeper else 0
    lost = (generation,) if generation > state.generation else ()
    return replace(state, sweeper=None, abandoned=(*state.abandoned, *lost))


@contextmanager
def hold_claim(store: Store) -> Iterator[Claim]:
    """Hold the claim to collect while the block runs. Raises ConflictError while another collection holds it."""
    begun, now = moments.steady_s(), store.now()
    me = Sweeper(secrets.token_hex(16), f"{socket.gethostname()} {os.getpid()}", now + SWEEPING)

    def change(known: MarkState) -> MarkState:
        other = known.sweeper
        if other is not None and other.id != me.id and now < other.expires:
            raise ConflictError(
                f"another collection ({other.by}) is at work, until {leases.stamp(other.expires)} at the latest if it "
                "died; run again when it is done"
            )
        return replace(without_sweeper(known), sweeper=me)

    claim = Claim(store, me, update_state(store, change), begun)
    try:
        with leases.keep_renewing(claim.renew, RENEW_S):
            yield claim
    except BaseException:
        with suppress(EnginesmithError):  # the claim ends by itself
            claim.release(())
        raise
