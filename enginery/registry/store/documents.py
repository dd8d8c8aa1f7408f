"""Changes a document that has several writers: compare-and-swap, repeated after a lost race."""

import random
import time
from collections.abc import Callable

from enginery.core.errors import ConflictError, UndecidedError
from enginery.registry.store.base import Store

# One limit for every document: a busy one has dozens of writers.
_ATTEMPTS = 200
# Whoever lost looks again a little later, so that many writers do not keep each other from writing.
_LOSERS_PAUSE_S = 0.01


def change(
    store: Store,
    key: str,
    make: Callable[[bytes | None], bytes | None],
    contains: Callable[[bytes | None, bytes], bool] = lambda found, written: found == written,
) -> bytes | None:
    """Replace a document by what `make` returns for its content (None: absent), and return the new content.

    `make` may return None to change nothing, and is called again after every lost race. contains(found, written):
    whether the content `found` includes the write `written`, whose response was lost; it is then not repeated. By
    default they must be equal, so that a change may be made twice if others write, too.

    Raises ConflictError when the document keeps changing, and whatever `make` raises.
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
            if contains(found := store.read(key), after):
                return found
    raise ConflictError(f"{key} of {store.uri} keeps changing; run again when fewer others write it")
