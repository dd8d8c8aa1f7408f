"""Calls a function of the user's on numpy arrays: one that lies between the graphs of an ensemble."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, ModelError
from enginesmith.user_code.channel import Arrays, MessageChannel
from enginesmith.user_code.entry_point import find_function, importing_from, place, reason
from enginesmith.user_code.published import importing_published


@dataclass(frozen=True)
class CallOnce:
    """Call the function on the arrays that come with this; or the answer, with those that it gave."""


@dataclass(frozen=True)
class CallFunction:
    """Import a function and call it whenever asked. node: what messages call it.

    The first answer is `CallOnce`; then each `CallOnce` gets one.
    """

    root: Path
    file: str
    function: str
    node: str

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Raises EOFError then, and ModelError for code that cannot be read."""
        with importing_from(self.root, self.file):
            found = find_function(self.root, self.file, self.function)
            channel.send(CallOnce())
            while True:
                _, arrays = channel.receive(CallOnce)
                channel.answer(partial(self._answer, found, arrays))

    def _answer(self, function: Callable[..., Any], arrays: Arrays) -> tuple[CallOnce, Mapping[str, Array]]:
        return CallOnce(), call(function, arrays, self.node, self.root)


def call(function: Callable[..., Any], arrays: Mapping[str, Array], name: str, root: Path) -> dict[str, Array]:
    """What a function gives for arrays. name: what messages call it.  root: the folder of its code.

    Raises DataError for any exception of its code, and for an answer that is no dict of arrays.
    """
    try:
        answer = function(**arrays)
    except Exception as error:
        where = place(error, root)
        raise DataError(f"function {name!r} failed{f' at {where}' if where else ''}: {reason(error)}") from error
    if not isinstance(answer, Mapping):
        raise DataError(f"function {name!r} returned a {type(answer).__name__}; return a dict with an array per output")
    try:
        return {str(key): np.asarray(value) for key, value in answer.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"function {name!r} returned something of which numpy makes no array: {error}") from error


def load_function(
    root: Path, file: str, function: str, files: Mapping[str, str]
) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """A function of a published version in this process, to be called with a mapping of arrays. root: the folder of its
    code.  files: digests of its file and of every module that it imports from there, by path.

    Its file is run: the bytes that have this digest, as those of its modules. Other files in the folder are not found,
    and the modules only while it is imported, not by imports inside of functions. Raises IntegrityError for other bytes
    than were published, DataError for files that are not there, ModelError for code that cannot be imported, and where
    the function is not in it.
    """
    with importing_published(root, file, files) as module:
        try:
            found = find_function(root, file, function, module)
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelError(f"{root / file} cannot be imported: {reason(error)}") from error
    return lambda arrays: call(found, arrays, function, root)
