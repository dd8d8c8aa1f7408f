"""Runs a command with its output in a log file, and shows the latest line on stderr.

    python examples/logged.py LOG COMMAND...

For commands with long output, such as pip: only the last line and the time are shown, on a terminal in
place, else every ten seconds. If a command fails, the end of its log is shown.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Seconds between two lines where stderr is no terminal.
EVERY_S = 10.0
TAIL_LINES = 20


class Status:
    """Shows a line on stderr with the seconds since the start, in a `with` block. text: the current activity."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Status":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _show(self) -> None:
        terminal = sys.stderr.isatty()
        while not self._over.wait(0.2 if terminal else EVERY_S):
            line = f"[{time.monotonic() - self._begun:4.0f} s] {self.text}"
            width = shutil.get_terminal_size().columns - 1 if terminal else 120
            print(
                f"\r{line[:width]}\x1b[K" if terminal else line[:width], end="" if terminal else "\n", file=sys.stderr
            )
            sys.stderr.flush()


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    shorten: Callable[[str], str] = str.strip,
    capture: bool = False,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The exit code of a command and, with `capture`, its stdout. Everything else that it prints is appended to `log`.

    shorten: returns the part of a line to show; '' keeps the shown one.  env: variables beside those of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    with log.open("a", encoding="utf-8") as lines, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        lines.write(f"$ {' '.join(command)}\n")
        pipes = {"stdout": file, "stderr": subprocess.PIPE} if capture else {"stdout": subprocess.PIPE}
        process = subprocess.Popen(
            command, **{"stderr": subprocess.STDOUT, **pipes}, text=True, errors="replace", env=environment
        )  # type: ignore[call-overload]
        with process, Status(Path(command[0]).name) as status:
            for line in process.stderr if capture else process.stdout:
                lines.write(line)
                lines.flush()
                status.text = shorten(line) or status.text
        file.seek(0)
        return process.returncode, file.read()


def show_end(log: Path) -> None:
    """Print the last lines of a log, and where it is."""
    print("".join(log.read_text("utf-8").splitlines(keepends=True)[-TAIL_LINES:]), end="", file=sys.stderr)
    print(f"the whole log: {log}", file=sys.stderr)


def main(log: Path, command: Sequence[str]) -> int:
    """Run the command line and return the command's exit code."""
    start_s = time.monotonic()
    print(f"$ {' '.join(command)}\n  the whole log: {log}", flush=True)
    code, _ = run_logged(command, log)
    if code:
        show_end(log)
    else:
        print(f"  done in {time.monotonic() - start_s:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
