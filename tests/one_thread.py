"""Thread pools of the product that run each call where it is submitted, for tests whose stores answer at once."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

ROOMS = ("enginesmith", "pipeline", "validation", "builders")


class Done:
    """The future of a call that was made when it was submitted."""

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = work(*args, **options)
        except Exception as error:
            self._error = error

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> bool:
        return False


class Inline:
    """An executor that runs each call where it is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Done:
        return Done(fn, args, options)

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter([fn(*args) for args in zip(*iterables, strict=False)])


def side_by_side(
    work: Callable[[Any], Any], items: Iterable[Any], *_: object, **__: object
) -> Iterator[tuple[Any, Any]]:
    """As `parallel.side_by_side`: all work is done before the first result, and raises after the results before it."""
    results: list[tuple[Any, Any, Exception | None]] = []
    for item in items:
        try:
            results.append((item, work(item), None))
        except Exception as error:
            results.append((item, None, error))
    for item, value, failure in results:
        if failure is not None:
            raise failure
        yield item, value


@contextmanager
def registry_in_one_thread() -> Iterator[None]:
    """Have the registry's modules start no pools: their threads take a third of a small collection."""
    pools = [vars(module) for name, module in sys.modules.items() if name.startswith("enginesmith.registry.")]
    pool_names = [names for names in pools if names.get("ThreadPoolExecutor") is futures.ThreadPoolExecutor]
    for names in pool_names:
        names["ThreadPoolExecutor"] = Inline
    try:
        yield
    finally:
        for names in pool_names:
            names["ThreadPoolExecutor"] = futures.ThreadPoolExecutor
