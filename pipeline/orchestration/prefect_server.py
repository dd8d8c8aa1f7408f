"""Prefect's own temporary server, so started that neither Ctrl-C nor a killed run leaves it in the wrong state.

A terminal's Ctrl-C goes to every process in the foreground. A server that it ends leaves the flow with nobody to report
its end to, and Prefect's client tries for minutes. And a run that is killed cannot stop its server.
"""

import signal
import subprocess
import sys

from prefect.server.api.server import SubprocessASGIServer

# Ends the process argv[1] when stdin ends, that is, when the run that holds the other end is gone, however it went.
_REAPER = """
import os, signal, sys
server = os.pidfd_open(int(sys.argv[1]))
sys.stdin.read()
try:
    signal.pidfd_send_signal(server, signal.SIGTERM)
except ProcessLookupError:
    pass
"""


def start_server() -> None:
    """Start the temporary server that Prefect's client will use; Prefect stops it when this process exits."""
    server = SubprocessASGIServer()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process inherits the mask of its maker
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if sys.platform == "linux" and server.server_process:
        _outlive(server.server_process.pid)


def _outlive(server: int) -> None:
    """Leave a small process behind that ends the server when this one is gone."""
    command = [sys.executable, "-I", "-S", "-c", _REAPER, str(server)]
    subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
