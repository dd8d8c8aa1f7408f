"""Messages between a job and the process of a user's code: a typed value as JSON, and numpy arrays behind it."""

import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from enginery.core.codec import decode, encode
from enginery.core.errors import EngineryError, error_from_json, error_to_json

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]


class UserCodeError(Exception):
    """An exception in the other process that is no EngineryError; the text has its type."""


class Channel:
    """One end of a socket that `file` is the descriptor of; takes it over."""

    def __init__(self, file: int) -> None:
        self._connection = Connection(file)

    def send(self, value: object, arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Send a frozen dataclass, and arrays of any shape and dtype; of objects only the shape.

        Raises OSError when the other end is closed.
        """
        given = arrays or {}
        shapes = {name: [_dtype_name(array.dtype), list(array.shape)] for name, array in given.items()}
        self._send_json({"value": encode(value), "arrays": shapes})
        for array in given.values():
            self._connection.send_bytes(b"" if array.dtype.hasobject else array.tobytes())

    def answer(self, compute: Callable[[], tuple[object, Mapping[str, NDArray[Any]]]]) -> None:
        """Send the value and the arrays that `compute` returns, or the error that it raises."""
        try:
            value, arrays = compute()
        except Exception as error:
            self.send_error(error)
        else:
            self.send(value, arrays)

    def send_error(self, error: Exception) -> None:
        """Send an error instead of an answer, which `receive` raises there; print the traceback of a bug."""
        if isinstance(error, EngineryError):
            self._send_json({"error": error_to_json(error)})
        else:
            traceback.print_exception(error)
            self._send_json({"exception": f"{type(error).__name__}: {error}"})

    def receive(self, kind: type[T]) -> tuple[T, Arrays]:
        """The next value, and the arrays behind it.

        Raises EOFError when the other end is closed, the EngineryError that was sent, or UserCodeError for any other.
        """
        header = self._receive_json()
        if "error" in header:
            raise error_from_json(header["error"])
        if "exception" in header:
            raise UserCodeError(header["exception"])
        found = {name: self._array(*described) for name, described in header["arrays"].items()}
        return decode(header["value"], kind), found

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _send_json(self, data: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(data).encode())

    def _receive_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return found

    def _array(self, name: str, shape: list[int]) -> NDArray[Any]:
        dtype, data = _dtype(name), bytearray(self._connection.recv_bytes())
        return np.empty(shape, dtype) if dtype.hasobject else np.frombuffer(data, dtype).reshape(shape)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.kind == "V" else dtype.str  # those of ml_dtypes have a name only


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
