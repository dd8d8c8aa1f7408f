"""Waiting for one's turn in sight of whoever looks at the run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from enginery.registry.build_lock import hold_build_lock
from pipeline.compile.run_context import RunContext
from pipeline.progress.events import Finished, Waiting


@contextmanager
def shown_turn(context: RunContext, name: str, what: str) -> Iterator[None]:
    """`hold_build_lock`, with the wait as a step of the run: who works, since when, and how long it took."""
    begun, waited = time.monotonic(), False

    def say(who: str) -> None:
        nonlocal waited
        waited = True
        context.progress.emit(Waiting("turn", who))

    with hold_build_lock(context.store, name, what, say):
        if waited:
            context.progress.emit(Finished("turn", reason=f"waited {time.monotonic() - begun:.0f} s"))
        yield
