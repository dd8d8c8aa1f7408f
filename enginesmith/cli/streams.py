"""Handles standard streams of the command line that are closed, full, or whose reader has exited.

A command has done its work whether or not its output can be written: lost output gives one message and an exit code
instead of a traceback.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNWRITABLE = 3
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _Checked(io.FileIO):
    """The file of an output stream. error: the last error of writing to it."""

    error: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        """Write as `FileIO` does, and store any error. After the reader has exited (`| head`), output is dropped and
        the command continues."""
        try:
            return super().write(data)
        except BrokenPipeError as error:
            self.error = error
            return memoryview(data).nbytes
        except OSError as error:
            self.error = error
            raise


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and make stdout and stderr store their errors.

    Otherwise the next file that is opened would get the stream's number, and prints would go into that file. Streams
    that were replaced in Python are left as they are.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _nullify(descriptor)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _check(sys.stdout)
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _check(sys.stderr)


def code_of_lost(error: OSError) -> int:
    """The exit code for an error of writing to stdout or stderr. Raises any other error again."""
    if all(_error_of(stream) is None for stream in (sys.stdout, sys.stderr)):
        raise error
    return UNWRITABLE


def write_stderr(text: str) -> None:
    """Write a line to stderr, if possible."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Flush and exit; with `UNWRITABLE` instead of 0 if output is lost.

    A reader that closed our stdout early (`| head`) is no error.
    """
    with suppress(OSError):
        sys.stdout.flush()
    error = _error_of(sys.stdout)
    if error is not None and not isinstance(error, BrokenPipeError):
        write_stderr(f"error: stdout cannot be written: {error.strerror}; send the output elsewhere and run again")
        code = code or UNWRITABLE
    for stream in (sys.stdout, sys.stderr):
        if _error_of(stream) is not None:  # the interpreter flushes again, and would end with a traceback
            _nullify(stream.fileno())
    sys.exit(code)


def _check(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    file = _Checked(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",  # characters that the locale cannot encode
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _error_of(stream: object) -> OSError | None:
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file.error if isinstance(file, _Checked) else None


def _nullify(number: int) -> None:
    null_fd = os.open(os.devnull, os.O_RDWR)
    if null_fd != number:
        os.dup2(null_fd, number)
        os.close(null_fd)
    os.set_inheritable(number, True)
