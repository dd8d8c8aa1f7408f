"""Many parallel requests to a store: results in the order of the items, with only a part of them in memory."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

# Simultaneous requests; a remote store keeps this many connections (`objects.api.CONNECTIONS`).
AT_ONCE = 32
# Items that a thread takes at a time, if there are enough of them: handing one over costs more than reading a file.
_MOST_IN_PART = 64

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], at_once: int = AT_ONCE, most_in_part: int = _MOST_IN_PART
) -> Iterator[tuple[Item, Result]]:
    """Each item with the result of `work` for it, in order, by `at_once` threads, which work a few parts ahead of the
    caller.

    most_in_part: items that a thread takes at a time; 1 for slow work.  Raises what `work` raises, after the results of
    earlier parts. Parts that no thread has begun are then dropped, as they are if the caller stops early.
    """
    if len(items) < 2:
        yield from ((item, work(item)) for item in items)
        return
    chunk_size = min(most_in_part, max(1, len(items) // (4 * at_once)))
    with ThreadPoolExecutor(min(at_once, len(items))) as pool:
        futures: deque[tuple[Sequence[Item], Future[list[Result]]]] = deque()
        try:
            for first_index in range(0, len(items), chunk_size):
                chunk = items[first_index : first_index + chunk_size]
                futures.append((chunk, pool.submit(lambda part: [work(item) for item in part], chunk)))
                if len(futures) > 2 * at_once:
                    chunk, future = futures.popleft()
                    yield from zip(chunk, future.result(), strict=True)
            for chunk, future in futures:
                yield from zip(chunk, future.result(), strict=True)
        finally:
            for _, future in futures:
                future.cancel()
