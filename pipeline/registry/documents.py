"""Changing a document that has several writers: read, change, compare and swap, again when another was faster."""

import random
import time
from collections.abc import Callable

from builders.errors import ConflictError, UndecidedError
from pipeline.registry.store import Store

_ATTEMPTS = 30
_LOSERS_PAUSE_S = 0.005


def change(store: Store, key: str, make: Callable[[bytes | None], bytes | None]) -> bytes | None:
    """Put what `make` makes of a document (None: absent) in its place, and return it; None changes nothing.

    `make` is called again after every lost race, and must make each writer's change visible in its result: a writer
    whose answer was lost may be added twice, so this is for documents that bear that.

    Raises ConflictError when the document never stands still, and whatever `make` raises.
    """
    for attempt in range(_ATTEMPTS):
        time.sleep(random.uniform(0, _LOSERS_PAUSE_S) * min(attempt, 20))  # noqa: S311 - no secret
        before = store.read(key)
        after = make(before)
        if after is None or after == before:
            return before
        try:
            if store.replace(key, after, before):
                return after
        except UndecidedError:
            continue
    raise ConflictError(f"{key} of {store.uri} keeps changing; run again when fewer others write it")
