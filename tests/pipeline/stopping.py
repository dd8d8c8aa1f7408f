"""`python -m tests.pipeline.stopping TEXT COMMAND ...`: the command line, which stops (SIGSTOP) once a line that it
writes to stderr holds the text: a test can then kill it right there, however fast it is."""

import os
import signal
import sys
from typing import Any, TextIO


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
            os.kill(os.getpid(), signal.SIGSTOP)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    from enginesmith.cli import main

    sys.stderr = Stopping(sys.stderr, sys.argv[1])
    main(sys.argv[2:])
