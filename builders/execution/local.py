"""Runs jobs on this host, each in a process of its own, a bounded number at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from builders.execution.jobs import Job, Result, Started, Waiting, Watch, ignore_event
from builders.execution.process import run_job
from builders.execution.retries import run_with_retries
from builders.execution.starting import Start, spawn
from builders.execution.workdir import workdir
from enginesmith.core.errors import StepError

# What a job waits for: any job, and one that has to run alone.
QUEUED = "a free slot"
ALONE = "the jobs that run here, to be timed alone"


class LocalExecutor:
    """An `Executor` of local processes. jobs: how many run at once, by default as many as there are CPUs.  start: how
    they come to be.

    Of `Job.needs` GPUs count, of which there is one here: jobs that hold it run one after the other; and `alone`.
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

        def attempt(job: Job[Result], _elsewhere: bool) -> Result:
            gpu = self._hold_slot(self._gpu, job, watch, "the GPU") if job.needs.gpus else nullcontext()
            alone = job.needs.alone
            slot = self._all_slots(job, watch) if alone else self._hold_slot(self._slots, job, watch, QUEUED)
            with gpu, slot:
                watch(Started(job.name))
                with workdir() as folder:
                    return run_job(job, folder, lambda: self._cancelled, watch, self._start)

        return run_with_retries(job, watch, attempt, clustered=False)

    def cancel(self) -> None:
        """Kill the jobs that run, within `process.TICK_S` (`GRACE_S` those that heed it), and refuse new ones."""
        self._cancelled = True

    @contextmanager
    def _all_slots(self, job: Job[object], watch: Watch) -> Iterator[None]:
        """Hold every slot, each as it comes free, so that new jobs cannot keep this one waiting. One job at a time does
        so: two would each hold slots that the other needs."""
        with self._hold_slot(self._alone, job, watch, ALONE), ExitStack() as slots:
            for _ in range(self._jobs):
                slots.enter_context(self._hold_slot(self._slots, job, watch, ALONE))
            yield

    @contextmanager
    def _hold_slot(self, slots: threading.Semaphore, job: Job[object], watch: Watch, what: str) -> Iterator[None]:
        """Hold one of the slots. The wait is short after `cancel`: the jobs that hold them are killed."""
        if not slots.acquire(blocking=False):
            watch(Waiting(job.name, what))
            slots.acquire()
        try:
            if self._cancelled:
                raise StepError(f"{job.name}: cancelled before it started", "cancelled")
            yield
        finally:
            slots.release()
