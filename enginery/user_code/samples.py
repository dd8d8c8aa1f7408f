"""Samples that a user's generator makes, given to another process one at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.errors import DataError
from enginery.user_code.channel import Arrays, Channel
from enginery.user_code.entry_point import call_entry_point, importing_from


@dataclass(frozen=True)
class NextSample:
    """Give the next sample of a pass over all of them; of a pass that has not begun, the first."""

    pass_number: int


@dataclass(frozen=True)
class Sample:
    """The arrays that come with this are one sample, unless it is the end of the pass."""

    is_end: bool = False


@dataclass(frozen=True)
class SampleGenerator:
    """Call the function of an entry point for each pass, and give what it makes. name: how messages call it.

    The first answer is an end; then each `NextSample` gets one `Sample`.
    """

    root: Path
    file: str
    function: str
    name: str

    def serve(self, channel: Channel) -> None:
        """Answer until the other end is closed. Raises EOFError then, and ModelError for code that cannot be read."""
        passes: dict[int, Iterator[tuple[Sample, Arrays]]] = {}
        with importing_from(self.root, self.file):
            channel.send(Sample(is_end=True))
            while True:
                asked, _ = channel.receive(NextSample)
                if asked.pass_number not in passes:
                    passes[asked.pass_number] = self._pass()
                channel.answer(partial(next, passes[asked.pass_number], (Sample(is_end=True), {})))

    def _pass(self) -> Iterator[tuple[Sample, Arrays]]:
        made = sample_items(lambda: call_entry_point(self.root, self.file, self.function, {}), self.name)
        for index, item in enumerate(made):
            given = {str(name): value for name, value in item.items() if value is not None}
            where = f"{self.name}: sample {index}"
            yield Sample(), {name: _array(value, f"{where}: {name!r}") for name, value in given.items()}


def _array(value: object, where: str) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is a {type(value).__name__}, of which numpy makes no array: {error}") from error


def sample_items(make: Callable[[], Iterable[Any]], name: str) -> Iterator[Mapping[str, Any]]:
    """What a user's function gives, one after the other. name: how messages call it.

    Raises DataError for whatever its code raises, and for what is no mapping of names to arrays.
    """
    done = 0
    try:
        for item in make():
            if not isinstance(item, Mapping):
                raise DataError(
                    f"{name}: sample {done} is a {type(item).__name__}; yield a dict with one array per input"
                )
            yield item
            done += 1
    except DataError:
        raise
    except Exception as error:  # whatever the user's code raises
        behind = f" behind sample {done - 1}" if done else ""
        raise DataError(f"{name} failed{behind}: {type(error).__name__}: {error}") from error
