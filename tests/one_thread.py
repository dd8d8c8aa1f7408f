"""Thread pools of the product that run each call where it is submitted, for tests whose stores answer at once."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

ROOMS = ("enginesmith", "pipeline", "validation", "builders")


class Inline(futures.Executor):
    """An executor that runs each call where it is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
        found: futures.Future[Any] = futures.Future()
        try:
            found.set_result(fn(*args, **kwargs))
        except Exception as error:
            found.set_exception(error)
        return found

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter([fn(*args) for args in zip(*iterables, strict=False)])


@contextmanager
def registry_in_one_thread() -> Iterator[None]:
    """Have the registry's modules start no pools: their threads take a third of a small collection."""
    pools = [vars(module) for name, module in sys.modules.items() if name.startswith("enginesmith.registry.")]
    held = [names for names in pools if names.get("ThreadPoolExecutor") is futures.ThreadPoolExecutor]
    for names in held:
        names["ThreadPoolExecutor"] = Inline
    try:
        yield
    finally:
        for names in held:
            names["ThreadPoolExecutor"] = futures.ThreadPoolExecutor
