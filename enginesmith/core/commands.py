"""Runs a command within a time limit, which ends it with all that it started."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

# Of what a command prints; it may go on, and the rest is dropped.
MOST_BYTES = 64 << 10


def run_command(
    words: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """How a command ended, with the first `MOST_BYTES` that it printed if `stdout` is a pipe. It has a process group of
    its own.

    stdout, stderr: as for `subprocess.run`.  environment: None is that of this process. Raises OSError where it cannot
    be started, subprocess.TimeoutExpired where it, or whatever holds its pipe, took longer; then, and after Ctrl-C, its
    process group was killed.
    """
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        output = _read_output(process, time.monotonic() + timeout_s, timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for its first process, so that this is its group
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return subprocess.CompletedProcess(words, process.returncode, output)


def _read_output(process: "subprocess.Popen[bytes]", end: float, timeout_s: float) -> bytes:
    """What a command prints until it has ended. end: the latest time of it, by the monotonic clock. Raises
    TimeoutExpired."""
    found = bytearray()
    with selectors.DefaultSelector() as selector:
        if process.stdout:
            selector.register(process.stdout, selectors.EVENT_READ)
        while process.stdout:
            if not selector.select(max(0.0, end - time.monotonic())) or time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            if not (data := os.read(process.stdout.fileno(), MOST_BYTES)):
                break
            found += data[: MOST_BYTES - len(found)]
    process.wait(max(0.0, end - time.monotonic()))
    return bytes(found)
