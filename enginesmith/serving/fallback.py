"""Answers requests that no bucket holds: by a runner compiled for their sizes, by engines with dynamic shapes."""

from collections.abc import Callable, Iterator, Sequence

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import Tensors
from enginesmith.serving.buckets import EngineBucket, RoutedEngine, Sizes
from enginesmith.serving.just_in_time import JustInTime

COMPILED = "compiled"
_WIDEN = "widen dims and build again, give inputs a pad, or give the router a fallback"


class FallbackChain:
    """The fallbacks of a router, in this order: a runner that was compiled for the request's sizes, where it is ready;
    each of `engines`; and where none of them answers, the compiled runner, which the request then waits for."""

    def __init__(self, engines: Sequence[RoutedEngine], compiled: JustInTime | None) -> None:
        self._engines, self._compiled = engines, compiled

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return (*(engine.name for engine in self._engines), *([COMPILED] if self._compiled else []))

    def answer(self, inputs: Tensors, sizes: Sizes, why: Callable[[], str]) -> tuple[str, dict[str, Array]]:
        """Name of the fallback that answered, and its outputs. why: in words, why no bucket holds the request.

        Raises DataError where there is no fallback, and EnginesmithError with the reason of each where all fail.
        """
        reasons: list[str] = []
        for name, run in self._runners(sizes):
            if (answer := _try(name, run, inputs, reasons)) is not None:
                return name, answer
        if not reasons:
            raise DataError(f"{why()}; {_WIDEN}")
        raise EnginesmithError(f"{why()}, and no fallback answers: {'; '.join(reasons)}")

    def _runners(self, sizes: Sizes) -> Iterator[tuple[str, Callable[[Tensors], Tensors]]]:
        compiled = self._compiled
        ready = compiled.find(sizes) if compiled else None
        if ready:
            yield COMPILED, ready
        yield from ((engine.name, engine.run) for engine in self._engines)
        if compiled and not ready:
            yield COMPILED, lambda inputs: compiled.wait(sizes)(inputs)


def _try(name: str, run: Callable[[Tensors], Tensors], inputs: Tensors, reasons: list[str]) -> dict[str, Array] | None:
    """The outputs; None where it fails, with the reason added to `reasons`."""
    try:
        return dict(run(inputs))
    except Exception as error:  # whatever a runtime raises
        reasons.append(f"{name}: {type(error).__name__}: {error}")
        return None


def describe_miss(sizes: Sizes, buckets: Sequence[EngineBucket]) -> str:
    """That no bucket holds a request, with its sizes and those that the buckets take."""
    given = ", ".join(f"{dim} {size}" for dim, size in sizes.items()) or "inputs of fixed sizes"
    names = [bucket.name for bucket in buckets]
    shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    return f"no bucket holds a request of {given}; buckets are {shown or 'none'}"
