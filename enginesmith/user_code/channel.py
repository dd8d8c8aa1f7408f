"""The channel between a process with user code and its owner, and calls over it."""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, EnginesmithError, ModelError, error_from_json, error_to_json
from enginesmith.core.names import is_path
from enginesmith.core.text import SelfClosing
from enginesmith.descriptions import find_file, read_file
from enginesmith.user_code.entry_point import find_function, importing_from, place, reason


class _PublishedSource(SourceFileLoader):
    """Runs source that was read and checked before. data: its bytes."""

    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self._data = data

    def get_data(self, path: str) -> bytes:
        """Return the source. Raises OSError for any other file, such as bytecode."""
        if path != self.path:
            raise FileNotFoundError(path)
        return self._data

    def path_stats(self, path: str) -> Mapping[str, int]:
        """Raise OSError, so that no bytecode is read or written."""
        raise FileNotFoundError(path)


class PublishedModules:
    """Finds modules in published files. files: bytes by path below `root`.  folders: of absolute imports, in `root`."""

    def __init__(self, root: Path, files: Mapping[str, bytes], folders: tuple[str, ...]) -> None:
        self._root, self._files, self._folders = root, files, folders

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """The spec of a module, or of a folder of modules; None for any other."""
        module_path = name.replace(".", "/")
        for folder in self._folders:
            base_path = str(PurePosixPath(folder) / module_path)
            for file in (f"{base_path}/__init__.py", f"{base_path}.py"):
                if file in self._files:
                    path = self._root / file
                    loader = _PublishedSource(name, str(path), self._files[file])
                    return spec_from_file_location(name, path, loader=loader)
            if any(file.startswith(f"{base_path}/") for file in self._files):
                return ModuleSpec(name, None, is_package=True)
        return None


@contextmanager
def importing_published(root: Path, file: str, digests: Mapping[str, str]) -> Iterator[str]:
    """Make a version's modules importable, and yield the module name of `file`. On exit, the modules are unloaded.

    root: the folder of the files.  digests: SHA-256 of each file, by its path in that folder.
    Raises ModelError for a file that is not among them, or has the name of a loaded module; DataError for an unreadable
    one, IntegrityError for other bytes than were published.
    """
    if file not in digests or not file.endswith(".py"):
        raise ModelError(f"{root / file} is not a published Python file ({', '.join(sorted(digests))}); pull it again")
    if invalid_path := next((name for name in digests if not is_path(name)), None):
        raise ModelError(f"{invalid_path[:80]!r} is not a path of a file in {root}; do not load it")
    files = {name: read_file(find_file(root, name), digest) for name, digest in digests.items()}
    folders = tuple(dict.fromkeys((str(PurePosixPath(file).parent), ".")))
    finder = PublishedModules(root, files, folders)
    for path in map(PurePosixPath, files):
        module_path = path.parent if path.name == "__init__.py" else path
        name = module_path.stem
        if str(module_path.parent) in folders and name in sys.modules:
            raise ModelError(f"{root / path} has the name of {name!r}, a module that is loaded already; rename it")
    earlier_modules = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield PurePosixPath(file).stem
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - earlier_modules:
            if finder.find_spec(name):
                del sys.modules[name]


# Messages between a job and the process of a user's code: a typed value as JSON, followed by numpy arrays.

T = TypeVar("T")
Arrays = dict[str, Array]


class UserCodeError(Exception):
    """An exception in the other process that is no EnginesmithError; the text contains its type."""


@dataclass(frozen=True)
class _Message:
    """The JSON message on the socket. arrays: dtype and shape of each; their bytes follow in this order."""

    value: object = None
    arrays: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    error: Mapping[str, object] | None = None
    exception: str | None = None


class MessageChannel(SelfClosing):
    """One end of a socket, whose descriptor `file` it takes over and closes."""

    def __init__(self, file: int) -> None:
        self._connection = Connection(file)

    def send(self, value: object, arrays: Mapping[str, Array] | None = None) -> None:
        """Send a frozen dataclass, and arrays of any shape and dtype; for arrays of Python objects, only the shape.

        Raises OSError if the other end is closed.
        """
        payload_arrays = arrays or {}
        array_types = ((name, array.dtype, array.shape) for name, array in payload_arrays.items())
        # A dtype of ml_dtypes is identified only by its name.
        array_layout = {
            name: (dtype.name if dtype.kind == "V" else dtype.str, shape) for name, dtype, shape in array_types
        }
        self._send(_Message(value=encode(value), arrays=array_layout))
        for array in payload_arrays.values():
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
        """Send an error instead of an answer, which `receive` raises at the other end; print the traceback of a bug."""
        if isinstance(error, EnginesmithError):
            self._send(_Message(error=error_to_json(error)))
        else:
            traceback.print_exception(error)
            self._send(_Message(exception=f"{type(error).__name__}: {error}"))

    def receive(self, kind: type[T]) -> tuple[T, Arrays]:
        """The next value, and the arrays after it.

        Raises EOFError if the other end is closed, the EnginesmithError that was sent, or UserCodeError for any other.
        """
        message = decode(json.loads(self._connection.recv_bytes()), _Message)
        if message.error is not None:
            raise error_from_json(message.error)
        if message.exception is not None:
            raise UserCodeError(message.exception)
        arrays = {}
        for name, (dtype_name, shape) in message.arrays.items():
            dtype, array_bytes = dtype_of(dtype_name), bytearray(self._connection.recv_bytes())
            arrays[name] = (
                np.empty(shape, dtype) if dtype.hasobject else np.frombuffer(array_bytes, dtype).reshape(shape)
            )
        return decode(message.value, kind), arrays

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self._connection.close()

    def _send(self, message: _Message) -> None:
        self._connection.send_bytes(json.dumps(encode(message)).encode())


@dataclass(frozen=True)
class ArraysOnly:
    """A message with only the arrays that follow it: the inputs of a function or a model, or its results."""


@dataclass(frozen=True)
class CallFunction:
    """Import a function and call it on request. node: its name in messages.

    The first answer is `ArraysOnly`; then each `ArraysOnly` gets one.

    root: the folder of the spec.  file, function: its file, relative to `root`, and its name.
    """

    root: Path
    file: str
    function: str
    node: str

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Then raises EOFError; ModelError for code that cannot be imported."""
        with importing_from(self.root, self.file):
            callee = find_function(self.root, self.file, self.function)
            channel.send(ArraysOnly())
            while True:
                _, arrays = channel.receive(ArraysOnly)
                channel.answer(partial(self._answer, callee, arrays))

    def _answer(self, function: Callable[..., Any], arrays: Arrays) -> tuple[ArraysOnly, Mapping[str, Array]]:
        return ArraysOnly(), call(function, arrays, self.node, self.root)


def call(function: Callable[..., Any], arrays: Mapping[str, Array], name: str, root: Path) -> dict[str, Array]:
    """The result of a function for arrays. name: for messages.  root: the folder of its code.

    Raises DataError for any exception of its code, and for a result that is no dict of arrays.
    """
    try:
        answer = function(**arrays)
    except Exception as error:
        location = place(error, root)
        raise DataError(f"function {name!r} failed{f' at {location}' if location else ''}: {reason(error)}") from error
    if not isinstance(answer, Mapping):
        raise DataError(f"function {name!r} returned a {type(answer).__name__}; return a dict with an array per output")
    try:
        return {str(key): np.asarray(value) for key, value in answer.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"function {name!r} returned a value that numpy cannot convert: {error}") from error


def load_function(
    root: Path, file: str, function: str, files: Mapping[str, str]
) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """A function of a published version in this process, to be called with a mapping of arrays. root: the folder of its
    code.  files: digests of its file and of every module that it imports from there, by path.

    Only bytes with these digests are run, for its file and its modules. Other files in the folder cannot be imported;
    its modules can, but only while it is imported, not inside functions. Raises IntegrityError for other bytes than
    were published, DataError for missing files, ModelError for code that cannot be imported, or lacks the function.
    """
    with importing_published(root, file, files) as module:
        try:
            callee = find_function(root, file, function, module)
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelError(f"{root / file} cannot be imported: {reason(error)}") from error
    return lambda arrays: call(callee, arrays, function, root)
