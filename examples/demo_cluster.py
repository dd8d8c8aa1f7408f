"""A cluster on this machine: Prefect server, worker, and Ray nodes of five GPU generations, which are only labels.

Registers the digits model and shows what happens automatically: the event, the run, which waits for Ray's head, and the
engines. Then a server's traffic drifts, which causes an event, new buckets, a candidate, its canary and promotion. The
canary compares errors and answers, and fails a candidate that is twice as slow; smaller differences in latency need a
machine without other work. Everything listens on loopback, lives in a temporary folder, and is ended with the demo,
also by Ctrl-C.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

SPEC = Path(__file__).resolve().parent / "digits" / "digits.yaml"
GENERATIONS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")
# Run as modules: their scripts may be in the `bin` of another environment than this Python.
MODULES = {"prefect": "prefect", "enginesmith": "enginesmith"}
# The flows of the demo, in order, and the first word of the names of their runs.
STARTS = {"compile-model": "compile", "choose-buckets": "buckets", "canary": "canary", "settle-canary": "settle"}
FLOWS = tuple(STARTS)
# The canary replays the recording for at most this time: few requests do not show that errors and answers are alike.
REPLAY = ("--canary-duration", "40s")
# An answer takes 0.1 ms beside all these processes, so each side's latency drifts with their load. If the difference of
# the sides drifts, a latency criterion is INSUFFICIENT for any margin and any number of requests.
MARGINS = "\nvalidation: {canary: {latency: {p50: null, p99: null}}}\n"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
PATIENCE_S = 900
# Otherwise Ray looks for servers on loopback at the machine's own address. Ray named this for other systems.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def main() -> None:
    """Run the demo."""
    signal.signal(signal.SIGTERM, _interrupt)
    start_s = time.monotonic()
    try:
        with ExitStack() as stack:
            _show(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="enginesmith-cluster-"))))
        print(f"\neverything is ended and gone; the demo took {time.monotonic() - start_s:.0f} s")
    except KeyboardInterrupt:
        print("\ninterrupted; everything is ended and gone")
        sys.exit(130)


def _show(stack: ExitStack, folder: Path) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": url, "DO_NOT_TRACK": "1"}
    os.environ.update(LOOPBACK_ONLY)
    environment |= {**LOOPBACK_ONLY, "PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    registry = folder / "registry"

    print(f"starting a Prefect server on {url} ...", flush=True)
    server = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    stack.enter_context(_process(server, folder / "server.log", environment))
    _ask(f"{url}/health")
    ray_port = _free_port()
    ray = ["--executor", "ray", "--ray-address", f"127.0.0.1:{ray_port}", "--wait-for-nodes", "10m"]
    traffic = folder / "traffic"
    traffic.mkdir()
    only_parts = [part for name in FLOWS for part in ("--only", name)]
    _run(
        [
            "enginesmith",
            "prefect",
            "deploy",
            "--registry",
            str(registry),
            "--traffic",
            str(traffic),
            *REPLAY,
            *only_parts,
            *ray,
        ],
        environment,
    )
    worker = ["prefect", "worker", "start", "--pool", "enginesmith", "--name", "demo"]
    stack.enter_context(_process(worker, folder / "worker.log", environment))
    spec = Path(shutil.copytree(SPEC.parent, folder / "digits"), SPEC.name)
    spec.write_text(SPEC.read_text() + MARGINS)
    _run(["enginesmith", "prefect", "register", str(spec), "--registry", str(registry)], environment)
    _await_line(url, "cannot reach the Ray cluster")
    print(f"starting Ray with a node for each of {', '.join(GENERATIONS)} ...", flush=True)
    stack.enter_context(_ray_cluster(ray_port))
    known_state = _follow(url, ["compile-model"], (0, 0))
    _run(["enginesmith", "show", "digits", "--registry", str(registry)], environment)

    _run(
        ["enginesmith", "promote", "digits@1", "digits:stable", "--proven-only", "--registry", str(registry)],
        environment,
    )
    print("\nA server records its requests; then its clients send larger ones:", flush=True)
    _run(["drifting-server", str(registry), str(traffic), url], environment)
    _follow(url, FLOWS, known_state)
    history = ["enginesmith", "registry", "history", "digits:stable", "--registry", str(registry)]
    _run(history, environment)
    moves = subprocess.run(_whole([*history, "--json"]), env=environment, check=True, capture_output=True).stdout
    if json.loads(moves)[-1]["version"] == "1":
        sys.exit("error: the candidate was not promoted: the canary's verdict and reason are in its run's line above")


def _follow(url: str, flows: Sequence[str], known: tuple[int, int]) -> tuple[int, int]:
    """Print messages of the runs until one of each flow, and every other, has ended; return their numbers.

    known: numbers of messages and ended runs that were printed before. A run that did not complete ends the demo.
    """
    deadline, (deadline_s, excess_count) = time.monotonic() + PATIENCE_S, known
    while time.monotonic() < deadline:
        runs = _post(f"{url}/flow_runs/filter", {"flow_runs": {"state": {"type": {"not_any_": ["SCHEDULED"]}}}})
        lines = _post(f"{url}/logs/filter", {"sort": "TIMESTAMP_ASC", "offset": deadline_s})
        for line in lines:
            if line["task_run_id"] is None:
                print(f"  {line['timestamp'][11:19]} {line['message']}", flush=True)
        deadline_s += len(lines)
        ended_runs = [run for run in runs if run["state_type"] in ENDED]
        for run in sorted(ended_runs, key=lambda run: run["end_time"] or "")[excess_count:]:
            print(
                ": ".join(filter(None, [f"  run '{run['name']}' {run['state_name']}", run["state"]["message"]])),
                flush=True,
            )
            if run["state_type"] != "COMPLETED":
                sys.exit(1)
        excess_count = len(ended_runs)
        names = {run["name"].partition(" ")[0] for run in ended_runs}
        if {STARTS[name] for name in flows} <= names and len(ended_runs) == len(runs) and not lines:
            return deadline_s, excess_count
        time.sleep(0.5)
    sys.exit(f"the runs did not end within {PATIENCE_S} s")


def _await_line(url: str, words: str) -> None:
    """Wait for a log line with these words, and print it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for line in _post(f"{url}/logs/filter", {"sort": "TIMESTAMP_ASC"}):
            if words in line["message"]:
                print(f"  {line['timestamp'][11:19]} {line['message']}", flush=True)
                return
        time.sleep(0.5)
    sys.exit(f"no run said '{words}' within {PATIENCE_S} s")


@contextmanager
def _ray_cluster(port: int) -> Iterator[None]:
    """A Ray cluster with a head at this port, and a node for each generation; its GPUs are only declared."""
    from ray.cluster_utils import Cluster

    fields = {"node_ip_address": "127.0.0.1"}
    cluster = Cluster()
    try:
        with _starting("head"):
            cluster.add_node(num_cpus=2, include_dashboard=False, gcs_server_port=port, **fields)
        for generation in GENERATIONS:
            with _starting(generation):
                cluster.add_node(num_cpus=1, num_gpus=1, labels={"enginesmith/sm": generation}, **fields)
        yield
    finally:
        cluster.shutdown()


@contextmanager
def _starting(node: str) -> Iterator[None]:
    """End the demo with a message if a Ray node does not start in time."""
    try:
        yield
    except Exception as error:  # Ray raises TimeoutError, RuntimeError or plain Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.exit(
            f"error: the Ray node '{node}' did not start: {reason[:400]}\n"
            "this machine may be too busy or short of memory: end other work, then run the demo again"
        )


@contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """A process in a group of its own, which Ctrl-C in the terminal does not reach; ended with all its children."""
    with log.open("wb") as stream:
        running_process = subprocess.Popen(
            _whole(command), env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield
    finally:
        running_process.terminate()
        try:
            running_process.wait(40)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running_process.pid, signal.SIGKILL)
            running_process.wait()


def _run(command: list[str], environment: dict[str, str]) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)
    done_result = subprocess.run(_whole(command), env=environment, check=False)
    if done_result.returncode:
        sys.exit(f"the command ended with exit code {done_result.returncode}")


def _whole(command: list[str]) -> list[str]:
    if command[0] == "drifting-server":
        return [sys.executable, str(SPEC.parents[1] / "drifting_server.py"), *command[1:]]
    return [sys.executable, "-m", MODULES[command[0]], *command[1:]]


def _post(url: str, body: Any) -> Any:
    return json.loads(_ask(url, json.dumps(body).encode()))


def _ask(url: str, data: bytes | None = None) -> bytes:
    """The answer to a request, repeated for 180 s while the server starts or is too busy. data: JSON to post."""
    deadline = time.monotonic() + 180
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bytes(answer.read())
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{url} did not answer within 180 s: {error}")
        time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
