"""`python -m tests.pipeline.stopping TEXT COMMAND ...`: the command line, which stops (SIGSTOP) once a line that it
writes to stderr holds the text: a test can then kill it right there, however fast it is. It never stops while
one of its threads writes a document: it would hold the lock of all writers of a folder."""

import os
import signal
import sys
import threading
from typing import Any, TextIO

from enginesmith.registry.store.folder import FileStore

_WRITES, _REPLACE = threading.Lock(), FileStore.replace


class Stopping:
    """Stands for stderr."""

    def __init__(self, stream: TextIO, text: str) -> None:
        self._stream, self._text, self._line = stream, text, ""

    def write(self, text: str) -> int:
        count = self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if self._text and any(self._text in line for line in lines):
            self._text = ""
            self._stream.flush()
            with _WRITES:
                os.kill(os.getpid(), signal.SIGSTOP)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _replace(store: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
    with _WRITES:
        return _REPLACE(store, key, data, expected)


if __name__ == "__main__":
    from enginesmith.cli import main

    FileStore.replace = _replace  # type: ignore[method-assign]
    sys.stderr = Stopping(sys.stderr, sys.argv[1])
    main(sys.argv[2:])
