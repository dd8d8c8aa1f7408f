"""Runs a command within a time limit, which ends it with all that it started."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress


def run_command(
    words: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """How a command ended, with what it printed if `stdout` is a pipe. It has a process group of its own.

    stdout, stderr: as for `subprocess.run`.  environment: None is that of this process. Raises OSError where it cannot
    be started, subprocess.TimeoutExpired where it, or whatever holds its pipe, took longer; then, and after Ctrl-C, its
    process group was killed.
    """
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for its first process, so that this is its group
        if process.stdout:
            process.stdout.close()
        process.wait()
        raise
    return subprocess.CompletedProcess(words, process.returncode, output or b"")
