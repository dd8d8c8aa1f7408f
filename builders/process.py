"""Runs one function in a process of its own, within limits, so that it can crash, hang or eat memory alone.

The caller writes WORKDIR/job.json and starts `python -m builders.process WORKDIR`; the child calls the function and
leaves WORKDIR/result.json, by atomic rename; whatever it prints goes to WORKDIR/job.log. The child leads a session and
process group of its own: when it ends or passes a limit, the whole group is killed. It runs with WORKDIR as its
current and its temporary folder, so arguments name absolute paths and droppings vanish with WORKDIR.

The memory limit is on the resident set (RSS) of the process and its descendants, looked at every `TICK_S`; a limit on
address space (RLIMIT_AS) would be exact, but CUDA and torch reserve far more of it than they use. Pages that forked
children share are counted more than once.
"""

import codecs
import ctypes
import importlib
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from builders import errors
from builders.errors import EngineryError, StepError
from builders.jobs import UNWATCHED, Job, Usage, Watch

TICK_S = 0.05
LOG_TAIL_BYTES = 16_384
_PR_SET_PDEATHSIG = 1
_WORKDIR = "ENGINERY_JOB_FOLDER"


def run_job(job: Job, workdir: Path, cancelled: Callable[[], bool] = lambda: False, watch: Watch = UNWATCHED) -> Any:
    """Run `job` in a fresh process under `workdir` (which must exist) and return the function's JSON result.

    `cancelled` is asked every `TICK_S`. `watch` is told of phases, output and usage; the executor tells it the rest.
    Raises the EngineryError that the function raised (class and message), or StepError: kind 'error' (any other
    exception, or an exit without a result), 'crash' (a signal), 'timeout', 'memory' or 'cancelled', with the end of
    the log.
    """
    workdir = workdir.resolve()
    task = {"function": job.function, "arguments": dict(job.arguments), "parent": os.getpid()}
    (workdir / "job.json").write_text(json.dumps(task))
    process = _start(workdir)
    sight = _Sight(workdir, watch)
    ended = None
    try:
        ended = _watch(process.pid, job, cancelled, sight)
    finally:  # also on Ctrl-C
        _kill_group(process)
        sight.end()
    if ended is not None:
        kind, reason = ended
        raise StepError(f"{job.name}: {reason}", kind, log_tail(workdir))
    return _result(job, process.returncode, workdir)


def enter_phase(name: str) -> None:
    """Say what the job does now; for the job's own process. Elsewhere, and on a full disk, nothing happens."""
    if folder := os.environ.get(_WORKDIR):
        with suppress(OSError):
            fresh = Path(folder) / "job.phase.part"
            fresh.write_text(name)
            fresh.replace(fresh.with_name("job.phase"))


def log_tail(workdir: Path) -> str:
    """The last 16 KiB of what the job in `workdir` printed; empty when it printed nothing."""
    log = workdir / "job.log"
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace")


def _start(workdir: Path) -> subprocess.Popen[bytes]:
    # The child finds the modules that its parent finds; -P keeps its current folder out of them.
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)  # noqa: PTH109 - joined as text
    environment = {**os.environ, "PYTHONPATH": places, "TMPDIR": str(workdir), _WORKDIR: str(workdir)}
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", "builders.process", str(workdir)]
    with (workdir / "job.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=workdir,
            env=environment,
            start_new_session=True,
        )


class _Sight:
    """What can be seen of a running job from outside, told to its watch: its phase, its log, the memory it holds."""

    def __init__(self, workdir: Path, watch: Watch) -> None:
        self._workdir = workdir
        self._watch = watch
        self._begun = time.monotonic()
        self._phase = ""
        self._seen_bytes = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.peak_mib = 0.0

    def look(self) -> None:
        """Tell what is new."""
        phase = _text_of(self._workdir / "job.phase")
        if phase and phase != self._phase:
            self._phase = phase
            self._watch.phase(phase)
        with (self._workdir / "job.log").open("rb") as log:
            log.seek(self._seen_bytes)
            # A job that prints without end has its time taken by its limit, not by us.
            new = log.read(LOG_TAIL_BYTES)
        self._seen_bytes += len(new)
        if text := self._decode(new):
            self._watch.said(text)

    def end(self) -> None:
        """Tell what is left to tell. No watch may keep the job's error from being raised."""
        seen = -1
        with suppress(OSError):
            while seen != self._seen_bytes:
                seen = self._seen_bytes
                self.look()
        self._watch.ended(Usage(time.monotonic() - self._begun, self.peak_mib))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _watch(pid: int, job: Job, cancelled: Callable[[], bool], sight: _Sight) -> tuple[str, str] | None:
    """Wait for the process; None when it ended by itself, else why it has to die, as (kind, reason)."""
    limits = job.limits
    deadline = time.monotonic() + limits.timeout_s
    while not _has_ended(pid):
        sight.look()
        if cancelled():
            return "cancelled", "cancelled"
        if time.monotonic() > deadline:
            return "timeout", f"still running after its limit of {limits.timeout_s:g} s; raise the limit"
        used_mib = resident_mib(pid)
        sight.peak_mib = max(sight.peak_mib, used_mib)
        if used_mib > limits.memory_mib:
            return "memory", f"held {used_mib:.0f} MiB, its limit is {limits.memory_mib} MiB; raise the limit"
        time.sleep(TICK_S)
    return None


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves a zombie, which keeps the group's number from being given to strangers until it is killed.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all its descendants, in MiB; those that have just ended count nothing."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for member in family:
        try:
            total += member.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 2**20


def _result(job: Job, status: int, workdir: Path) -> Any:
    """What the child left behind: a value to return, an error to raise, or nothing."""
    path = workdir / "result.json"
    if not path.exists():
        raise _no_result(job, status, log_tail(workdir))
    result = json.loads(path.read_text())
    if "error" in result:
        raise error_from_json(result)
    if "exception" in result:
        raise StepError(f"{job.name}: {result['exception']}", "error", log_tail(workdir))
    return result["value"]


def _no_result(job: Job, status: int, log: str) -> StepError:
    if status >= 0:
        return StepError(f"{job.name}: ended with exit status {status} and no result", "error", log)
    hint = " (the kernel does that when memory runs out; see dmesg)" if -status == signal.SIGKILL else ""
    return StepError(f"{job.name}: killed by {_signal_name(-status)}{hint}", "crash", log)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals have no names
        return f"signal {number}"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end now if `parent` is gone already.

    Linux only (prctl(2)); elsewhere a killed parent leaves its children to finish.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def _call(function: str, arguments: dict[str, Any], workdir: Path) -> Any:
    module, _, name = function.partition(":")
    target = getattr(importlib.import_module(module), name)
    if "workdir" in inspect.signature(target).parameters:
        arguments = {**arguments, "workdir": workdir}
    return target(**arguments)


def _outcome(task: dict[str, Any], workdir: Path) -> str:
    """Call the function; its value or its exception, as JSON."""
    try:
        return json.dumps({"value": _call(task["function"], task["arguments"], workdir)})
    except EngineryError as error:
        traceback.print_exc()
        return json.dumps(error_to_json(error))
    except Exception as error:
        traceback.print_exc()
        return json.dumps({"exception": f"{type(error).__name__}: {error}"})


def error_to_json(error: EngineryError) -> dict[str, Any]:
    """An error's class and constructor arguments; a subclass from elsewhere becomes its nearest known ancestor."""
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    arguments = error.__reduce__()[1] if type(error) is known else (str(error),)
    return {"error": known.__name__, "arguments": arguments}


def error_from_json(data: Mapping[str, Any]) -> EngineryError:
    """The error that `error_to_json` wrote."""
    made: EngineryError = getattr(errors, data["error"])(*data["arguments"])
    return made


def main(workdir: Path) -> None:
    """The child's side: run WORKDIR/job.json, leave WORKDIR/result.json, and end at once.

    It ends by `os._exit`: the result is on disk, and no compiler's own teardown may hang or crash on top of it.
    """
    task = json.loads((workdir / "job.json").read_text())
    die_with_parent(task["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unfinished = workdir / "result.json.part"
    unfinished.write_text(_outcome(task, workdir))
    unfinished.replace(workdir / "result.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
