"""Runs one job in a process of its own, with limits on its time and memory."""

import codecs
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from builders.execution.jobs import (
    ChildTask,
    Job,
    MemoryHeld,
    PhaseEntered,
    Printed,
    ProcessEnded,
    Result,
    Usage,
    Watch,
    encode_request,
    ignore_event,
    result_type,
)
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import StepError, error_from_json

# Memory of a job's processes, and how often the kernel has killed a process because memory ran out.
#
# Pages of mapped files, such as the weights of a large model, do not count: the kernel drops them when it needs memory.
# The memory of every running job is measured every `process.TICK_S`. psutil finds children by reading the status of
# every process of the machine, which takes milliseconds if hundreds run. Linux lists a thread's children (proc(5),
# since 3.5, if the kernel is built with CONFIG_PROC_CHILDREN, as in distributions).
#
# Source of the kernel's counts: Linux' cgroup-v2.rst (memory.events: oom_kill counts the cgroup's processes killed by
# any OOM killer) and /proc/vmstat's oom_kill (since 4.13), which counts the whole machine and so other jobs' processes
# too.

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """How often the kernel killed a process of this cgroup, or else machine, for lack of memory; 0 if unknown."""
    cgroup = next((line[3:].lstrip("/") for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")), "")
    cgroup_kills = _count_kills(cgroups / cgroup / "memory.events")
    return cgroup_kills if cgroup_kills is not None else _count_kills(proc / "vmstat") or 0


def _count_kills(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def held_mib(pid: int) -> float:
    """MiB of memory of a process and its running descendants, without mapped files."""
    if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        return sum(map(_held_kib, _family(pid))) / 1024
    return _by_psutil(pid)


def _held_kib(pid: int) -> int:
    """Resident memory of one process without mapped files, or with them on Linux before 4.5, in KiB."""
    fields = dict(line.split(":", 1) for line in _text(f"/proc/{pid}/status").splitlines() if ":" in line)
    resident_kib, mapped_kib = (int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "RssFile"))
    return resident_kib - mapped_kib


def _family(pid: int) -> Iterator[int]:
    """The pids of a process and its descendants that still exist."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names are all that is wanted
            for child in _text(f"/proc/{pid}/task/{thread}/children").split():
                yield from _family(int(child))


def _text(path: str) -> str:
    try:
        with open(path) as stream:  # noqa: PTH123 - a path object for each would cost more than the reading
            return stream.read()
    except OSError:
        return ""


def _by_psutil(pid: int) -> float:
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for member in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += _held_kib(member.pid) or member.memory_info().rss >> 10
    return total / 1024


# A job's process is a new interpreter (`spawn`), or a fork of one that has imported its modules (`fork_client`).

# The command of an interpreter; -P excludes the current folder from its module path.
PYTHON = (sys.executable, "-P", "-X", "faulthandler")
# The environment variable with the job's folder, in the job's own process.
FOLDER_VARIABLE = "ENGINESMITH_JOB_FOLDER"


@dataclass(frozen=True)
class Ended:
    """How a process ended. status: as `Popen.returncode`.  cpu_s: its CPU time, and that of the processes it waited
    for."""

    status: int
    cpu_s: float


class Child(Protocol):
    """A job's process, which leads a session and process group of its own."""

    @property
    def pid(self) -> int:
        """The process's number, which is also that of its group. Until `end` no other process gets it."""

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended by itself, or does so within `within_s` seconds."""

    def end(self) -> Ended:
        """Kill the remaining processes of its group, and read its status."""


# Starts a process of `builders.execution.child` in a work folder, with its output in job.log there. The integer is the
# file descriptor of a pipe: when it closes, the process and its group are killed.
Start = Callable[[Path, int], Child]


def spawn(workdir: Path, lifeline: int, python: Path | None = None) -> Child:
    """Start a new interpreter for the job in `workdir`. Raises OSError.

    python: the interpreter of another environment, which finds its own modules; None for this process's interpreter.
    """
    command = [*module_command(python), "builders.execution.child", str(workdir), str(lifeline), str(os.getpid())]
    with (workdir / "job.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=workdir,
            env={**environment(python), **variables_of(workdir)}, pass_fds=(lifeline,), start_new_session=True,
        )  # fmt: skip
    return _Spawned(process, _descriptor(process.pid))


def module_command(python: Path | None = None) -> list[str]:
    """The start of a command line that runs a module; the module's name and its arguments follow."""
    return [str(python or PYTHON[0]), *PYTHON[1:], "-m", "enginesmith.rooms"]


def environment(python: Path | None = None) -> dict[str, str]:
    """This process's environment variables, with its module path as PYTHONPATH; for another `python` without it."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return variables if python else {**variables, "PYTHONPATH": module_path()}


def variables_of(workdir: Path) -> dict[str, str]:
    """The environment variables that a job in `workdir` has in addition to its parent's."""
    return {"TMPDIR": str(workdir), FOLDER_VARIABLE: str(workdir)}


def module_path() -> str:
    """The PYTHONPATH with which a child finds the same modules as this process."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109 - joined as text


def is_readable(descriptor: int, within_s: float | None) -> bool:
    """Whether a descriptor is readable, now or within `within_s` seconds; that of a process (`os.pidfd_open`) is
    readable when the process has ended. within_s: None waits for ever."""
    poller = select.poll()  # `select` takes no descriptor above 1023
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(within_s if within_s is None else within_s * 1000))


def _descriptor(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None if there is none (not Linux, a sandbox)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True)
class _Spawned:
    process: subprocess.Popen[bytes]
    descriptor: int | None

    @property
    def pid(self) -> int:
        return self.process.pid

    def has_ended(self, within_s: float = 0.0) -> bool:
        if self.descriptor is not None:
            return is_readable(self.descriptor, within_s)
        time.sleep(within_s)
        # WNOWAIT leaves a zombie, which keeps the group's number from being given to strangers until it is killed.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> Ended:
        os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return Ended(self.process.returncode, usage.ru_utime + usage.ru_stime)


# Runs one request in a process of its own, within limits: a crash, a hang or high memory use affects that process only.
#
# The caller writes WORKDIR/job.json and starts `builders.execution.child` with WORKDIR (`_start`). The child runs the
# request and writes WORKDIR/result.json, by atomic rename; its output goes to WORKDIR/job.log. The child leads a
# session and process group of its own. The group is killed when the child ends or passes a limit, and when its parent
# dies in any way.
# The child's current and temporary folder is WORKDIR: arguments name absolute paths, and files left behind vanish with
# WORKDIR. A job that promised to end when asked (`heed_stop`) is asked before a timeout or cancellation kills it, and
# has `GRACE_S` to save its measurements.
#
# The memory limit is on what the process and its descendants hold (`held_mib`), read every `TICK_S`; a limit on
# address space (RLIMIT_AS) would be exact, but CUDA and torch reserve far more of it than they use. Pages that forked
# children share are counted more than once.

# Seconds between two polls of a job.
TICK_S = 0.05
# How much of the end of a job's output an error contains.
LOG_TAIL_BYTES = 16_384
# How long a job that promised to end when asked (`heed_stop`) may take for it.
GRACE_S = 10.0
_HEEDS, _STOP = "job.heeds", "job.stop"
# A new memory peak is reported if it is higher by a tenth and by this much.
_NOTABLE_MIB = 16.0


def run_job(
    job: Job[Result],
    workdir: Path,
    cancelled: Callable[[], bool] = lambda: False,
    watch: Watch = ignore_event,
    start: Start = spawn,
) -> Result:
    """Run `job` in a fresh process under `workdir` (which must exist) and return the result of its request.

    `cancelled` is called every `TICK_S`. `watch` gets the events of phases, output, memory and usage; the executor
    sends the others. start: starts the process. Raises the EnginesmithError that the request raised (class and
    message), or StepError: kind 'error' (any other exception, or an exit without a result), 'crash' (a signal),
    'timeout', 'memory', 'node-memory' (killed by the kernel for memory) or 'cancelled', with the end of the log.
    """
    workdir = workdir.resolve()
    kills_before = oom_kills()
    child, lifeline = _start(job, workdir, start)
    observer = _Observer(job.name, workdir, watch)
    stop_reason = None
    try:
        stop_reason = _watch(child, job, cancelled, observer)
        if stop_reason is not None and stop_reason[0] in ("timeout", "cancelled"):
            _ask_to_end(child, workdir)
    finally:  # also on Ctrl-C
        status, cpu_s = astuple(child.end())
        os.close(lifeline)
        observer.end(cpu_s)
    if stop_reason is not None:
        kind, reason = stop_reason
        raise StepError(f"{job.name}: {reason}", kind, log_tail(workdir), observer.peak_mib)
    if status == -signal.SIGKILL and oom_kills() > kills_before:
        reason = f"killed by the kernel, which ran out of memory; it held {observer.peak_mib:.0f} MiB"
        raise StepError(f"{job.name}: {reason}", "node-memory", log_tail(workdir), observer.peak_mib)
    return _result(job, status, workdir)


def enter_phase(name: str) -> None:
    """Report the phase that the job enters, in the job's process. Does nothing elsewhere, and on a full disk."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):
            part_path = Path(folder) / "job.phase.part"
            part_path.write_text(name)
            part_path.replace(part_path.with_name("job.phase"))


def heed_stop() -> Callable[[], bool]:
    """Promise that this job ends soon after it is asked to; returns a function that tells whether it was asked.

    Call it in the job's process; elsewhere the function always returns False.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return lambda: False
    with suppress(OSError):
        (Path(folder) / _HEEDS).touch()
    return (Path(folder) / _STOP).exists


def log_tail(workdir: Path) -> str:
    """The last 16 KiB of what the job in `workdir` printed; empty when it printed nothing."""
    log = workdir / "job.log"
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace")


def _start(job: Job[object], workdir: Path, start: Start) -> tuple[Child, int]:
    """The child, and the end of a pipe that no other process holds: when it closes, the child's group dies."""
    (workdir / "job.json").write_text(json.dumps(encode(ChildTask(encode_request(job.request), job.store))))
    write_fd, read_fd = os.pipe()
    try:
        return start(workdir, write_fd), read_fd
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)


class _Observer:
    """Reports the externally visible state of a running job: its phase, its log, its memory."""

    def __init__(self, name: str, workdir: Path, watch: Watch) -> None:
        self._name, self._workdir, self._watch = name, workdir, watch
        self._begun, self._phase, self._seen_bytes = time.monotonic(), "", 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._told_mib = self.peak_mib = 0.0

    def weigh(self, used_mib: float) -> None:
        """Record the current memory, and report a clearly higher peak."""
        self.peak_mib = max(self.peak_mib, used_mib)
        if self.peak_mib > max(1.1 * self._told_mib, self._told_mib + _NOTABLE_MIB):
            self._told_mib = self.peak_mib
            self._watch(MemoryHeld(self._name, self.peak_mib))

    def look(self) -> None:
        """Report a new phase, and the output since the last call."""
        phase = ""
        with suppress(OSError):
            phase = (self._workdir / "job.phase").read_text(errors="replace")
        if phase and phase != self._phase:
            self._phase = phase
            self._watch(PhaseEntered(self._name, phase))
        with (self._workdir / "job.log").open("rb") as log:
            log.seek(self._seen_bytes)
            # In pieces: a job that prints without end must not delay the checks of its limits.
            new_bytes = log.read(LOG_TAIL_BYTES)
        self._seen_bytes += len(new_bytes)
        if text := self._decode(new_bytes):
            self._watch(Printed(self._name, text))

    def end(self, cpu_s: float) -> None:
        """Report the remaining output, and the usage with this CPU time. An OSError would hide the job's own error."""
        previous_bytes = -1
        with suppress(OSError):
            while previous_bytes != self._seen_bytes:
                previous_bytes = self._seen_bytes
                self.look()
        self._watch(ProcessEnded(self._name, Usage(time.monotonic() - self._begun, self.peak_mib, cpu_s)))


def _watch(
    child: Child, job: Job[object], is_cancelled: Callable[[], bool], observer: _Observer
) -> tuple[str, str] | None:
    """Wait for the process; None if it ended by itself, else the (kind, reason) for killing it."""
    limits = job.limits
    deadline = time.monotonic() + limits.timeout_s
    tick_s = 0.0
    while not child.has_ended(tick_s):
        observer.look()
        if is_cancelled():
            return "cancelled", "cancelled"
        if time.monotonic() > deadline:
            return "timeout", f"still running after its limit of {limits.timeout_s:g} s; {limits.raise_timeout}"
        used_mib = held_mib(child.pid)
        observer.weigh(used_mib)
        if used_mib > limits.memory_mib:
            return "memory", f"held {used_mib:.0f} MiB, its limit is {limits.memory_mib} MiB; {limits.raise_memory}"
        tick_s = TICK_S
    return None


def _ask_to_end(child: Child, workdir: Path) -> None:
    """Ask a job that called `heed_stop` to end, and wait up to `GRACE_S`."""
    if not (workdir / _HEEDS).exists():
        return
    with suppress(OSError):
        (workdir / _STOP).touch()
    deadline = time.monotonic() + GRACE_S
    while not child.has_ended(TICK_S) and time.monotonic() < deadline:
        pass


def _result(job: Job[Result], status: int, workdir: Path) -> Result:
    """The value of the child's result. Raises the error that the result has, or `ended_error` without a result."""
    path = workdir / "result.json"
    if not path.exists():
        raise ended_error(job.name, status, log_tail(workdir))
    result = json.loads(path.read_text())
    if "error" in result:
        error = error_from_json(result)
        if isinstance(error, StepError):  # from a process that the job itself had started
            error.log = error.log or log_tail(workdir)
        raise error
    if exception := result.get("exception"):
        raise StepError(f"{job.name}: {exception}", "error", log_tail(workdir))
    return decode(result.get("value"), result_type(job.request))


def ended_error(name: str, status: int, log: str = "") -> StepError:
    """The error for a process that left no result. name: the process, in the text.  status: as `Popen.returncode`."""
    if status >= 0:
        return StepError(f"{name}: ended with exit status {status} and no result", "error", log)
    hint = " (the kernel does that when memory runs out; see dmesg)" if -status == signal.SIGKILL else ""
    try:
        signal_name = signal.Signals(-status).name
    except ValueError:  # the real-time signals have no names
        signal_name = f"signal {-status}"
    return StepError(f"{name}: killed by {signal_name}{hint}", "crash", log)
