"""The Prefect API: errors where it is out of reach, and Prefect's temporary server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

from enginesmith.core.errors import UnavailableError
from pipeline.orchestration.artifacts import api_problem, error_text


@contextmanager
def api_in_reach(remedy: str = "start its server, or correct PREFECT_API_URL") -> Iterator[None]:
    """Turn what Prefect raises when its API does not answer (`is_away`), or is not one, into UnavailableError."""
    try:
        yield
    except (httpx.HTTPError, json.JSONDecodeError, ValidationError, RuntimeError) as error:
        if problem := api_problem(error, PREFECT_API_URL.value()):
            raise UnavailableError(problem) from error
        if not is_away(error):
            raise
        problem = f"Prefect: {PREFECT_API_URL.value()} does not answer ({error_text(error)})"
        raise UnavailableError(f"{problem}; {remedy}") from error


def is_away(error: BaseException | None) -> bool:
    """Whether Prefect's client raised `error` because the API did not answer, or answered with 5xx or 429."""
    if isinstance(error, ConcurrencySlotAcquisitionError):
        return isinstance(error.__cause__, OSError) or is_away(error.__cause__)
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    if isinstance(error, RuntimeError):  # of a client's first request
        return str(error).startswith("Failed to reach API")
    return isinstance(error, httpx.TransportError)


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
    """Start the temporary server that Prefect's client will use; Prefect stops it when this process exits.

    Ctrl-C in a terminal goes to all its processes. If it ended the server, Prefect's client would try for minutes to
    report the flow's end, so the server ignores it. A run that is killed cannot stop its server: a small process waits
    for the end of this one and stops it.
    """
    # Not above: it takes longer to import than all that the flow run of a worker needs.
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process inherits the mask of its parent
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    if sys.platform == "linux" and server.server_process:
        command = [sys.executable, "-I", "-S", "-c", _REAPER, str(server.server_process.pid)]
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
