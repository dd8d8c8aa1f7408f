"""Runs jobs on this machine: working directories, and the executor."""

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from builders.execution.jobs import Job, Result, Started, Waiting, Watch, ignore_event, run_with_retries
from builders.execution.process import Start, run_job, spawn
from enginesmith.core.errors import StepError, UnavailableError

# Work folders are removed even after a SIGKILL: the next process that makes one on the host removes abandoned ones.
#
# The process that uses a folder holds a lock (flock(2)) on a file in it. The kernel releases the lock when the process
# ends in any way, so a folder whose lock can be taken is in use by no process.

_PREFIX = "enginesmith-"
_LOCK = ".in-use"


@contextmanager
def workdir() -> Iterator[Path]:
    """A new folder in the system's temporary folder, removed at the end. Raises UnavailableError if that fails."""
    try:
        folder, lock = _make()
    except OSError as error:
        raise UnavailableError(f"cannot make a work folder: {error}; free some space or set TMPDIR") from error
    try:
        remove_left_behind(folder.parent)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def require_plain(folder: Path, title: str) -> None:
    """Raise UnavailableError if the path has white space, which breaks the linker command of the compiler `title`."""
    if any(char.isspace() for char in str(folder)):
        raise UnavailableError(
            f"{title} cannot work in {str(folder)!r}, whose path has a space; set TMPDIR to a folder without one"
        )


def remove_left_behind(parent: Path) -> None:
    """Remove the work folders under `parent` whose process has ended, except those of other users."""
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock = os.open(lock_path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder, and the lock on it. Tries again if another process removed the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)


# Reasons to wait: for any job, and for a job that runs alone.
QUEUED = "a free slot"
ALONE = "the jobs that run here, to be timed alone"


class LocalExecutor:
    """An `Executor` of local processes. jobs: how many run at once; by default the number of CPUs.  start: starts their
    processes.

    It uses only `gpus` and `alone` of `Job.needs`, and one GPU: jobs that need GPUs run one after the other.
    """

    def __init__(self, jobs: int | None = None, start: Start = spawn) -> None:
        self._jobs, self._start = jobs or os.cpu_count() or 1, start
        self._slots = threading.Semaphore(self._jobs)
        self._gpu, self._alone = threading.Semaphore(1), threading.Semaphore(1)
        # A plain flag, not an Event: setting it takes no lock, which is what a signal handler needs.
        self._cancelled = False

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        """Wait for a free slot, then run the job in a folder that is removed afterwards. Errors are `run_job`'s,
        and UnavailableError when there is no room for the folder."""

        def attempt(job: Job[Result], _other_node: bool) -> Result:
            gpu = self._hold_slot(self._gpu, job, watch, "the GPU") if job.needs.gpus else nullcontext()
            is_alone = job.needs.alone
            slot = self._all_slots(job, watch) if is_alone else self._hold_slot(self._slots, job, watch, QUEUED)
            with gpu, slot:
                watch(Started(job.name))
                with workdir() as folder:
                    return run_job(job, folder, lambda: self._cancelled, watch, self._start)

        return run_with_retries(job, watch, attempt, clustered=False)

    def cancel(self) -> None:
        """Kill running jobs within `process.TICK_S` (`GRACE_S` if they handle the signal), and refuse new ones."""
        self._cancelled = True

    @contextmanager
    def _all_slots(self, job: Job[object], watch: Watch) -> Iterator[None]:
        """Hold every slot; each is taken as soon as it is free, so that new jobs do not delay this one. One job at a
        time may do this: two would each hold slots that the other needs."""
        with self._hold_slot(self._alone, job, watch, ALONE), ExitStack() as slots:
            for _ in range(self._jobs):
                slots.enter_context(self._hold_slot(self._slots, job, watch, ALONE))
            yield

    @contextmanager
    def _hold_slot(self, slots: threading.Semaphore, job: Job[object], watch: Watch, reason: str) -> Iterator[None]:
        """Hold one of the slots. After `cancel` the wait is short, because running jobs are killed."""
        if not slots.acquire(blocking=False):
            watch(Waiting(job.name, reason))
            slots.acquire()
        try:
            if self._cancelled:
                raise StepError(f"{job.name}: cancelled before it started", "cancelled")
            yield
        finally:
            slots.release()
