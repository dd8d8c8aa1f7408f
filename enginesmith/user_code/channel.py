"""Messages between a job and the process of a user's code: a typed value as JSON, and numpy arrays behind it."""

import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import EnginesmithError, error_from_json, error_to_json

T = TypeVar("T")
Arrays = dict[str, Array]


class UserCodeError(Exception):
    """An exception in the other process that is no EnginesmithError; the text has its type."""


@dataclass(frozen=True)
class _Message:
    """What goes over the socket as JSON. arrays: dtype and shape of each, whose bytes follow in this order."""

    value: object = None
    arrays: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    error: Mapping[str, object] | None = None
    exception: str | None = None


class MessageChannel:
    """One end of a socket, of which it takes over and closes the descriptor `file`."""

    def __init__(self, file: int) -> None:
        self._connection = Connection(file)

    def send(self, value: object, arrays: Mapping[str, Array] | None = None) -> None:
        """Send a frozen dataclass, and arrays of any shape and dtype; of arrays of Python objects only the shape.

        Raises OSError when the other end is closed.
        """
        given = arrays or {}
        dtypes = ((name, array.dtype, array.shape) for name, array in given.items())
        # Only its name tells a dtype of ml_dtypes.
        layout = {name: (dtype.name if dtype.kind == "V" else dtype.str, shape) for name, dtype, shape in dtypes}
        self._send(_Message(value=encode(value), arrays=layout))
        for array in given.values():
            self._connection.send_bytes(b"" if array.dtype.hasobject else array.tobytes())

    def answer(self, compute: Callable[[], tuple[object, Mapping[str, Array]]]) -> None:
        """Send the value and the arrays that `compute` returns, or the error that it raises."""
        try:
            value, arrays = compute()
        except Exception as error:
            self.send_error(error)
        else:
            self.send(value, arrays)

    def send_error(self, error: Exception) -> None:
        """Send an error instead of an answer, which `receive` raises there; print the traceback of a bug."""
        if isinstance(error, EnginesmithError):
            self._send(_Message(error=error_to_json(error)))
        else:
            traceback.print_exception(error)
            self._send(_Message(exception=f"{type(error).__name__}: {error}"))

    def receive(self, kind: type[T]) -> tuple[T, Arrays]:
        """The next value, and the arrays behind it.

        Raises EOFError when the other end is closed, the EnginesmithError that was sent, or UserCodeError for any
        other.
        """
        message = decode(json.loads(self._connection.recv_bytes()), _Message)
        if message.error is not None:
            raise error_from_json(message.error)
        if message.exception is not None:
            raise UserCodeError(message.exception)
        arrays = {}
        for name, (dtype_name, shape) in message.arrays.items():
            dtype, data = dtype_of(dtype_name), bytearray(self._connection.recv_bytes())
            arrays[name] = np.empty(shape, dtype) if dtype.hasobject else np.frombuffer(data, dtype).reshape(shape)
        return decode(message.value, kind), arrays

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _send(self, message: _Message) -> None:
        self._connection.send_bytes(json.dumps(encode(message)).encode())
