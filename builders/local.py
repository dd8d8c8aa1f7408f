"""Runs jobs on this host, each in a process of its own, a bounded number at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from builders.errors import StepError
from builders.jobs import UNWATCHED, Job, Watch
from builders.process import TICK_S, run_job
from builders.workdir import workdir


class LocalExecutor:
    """An `Executor` of local processes. `jobs` is how many run at once; by default as many as there are CPUs.

    Labels in `Job.needs` are ignored: there is one host.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._slots = threading.Semaphore(jobs or os.cpu_count() or 1)
        # A plain flag, not an Event: setting it takes no lock, which is what a signal handler needs.
        self._cancelled = False

    def run(self, job: Job, watch: Watch = UNWATCHED) -> Any:
        """Wait for a free slot, then run the job in a folder that is removed afterwards. Errors are `run_job`'s,
        and UnavailableError when there is no room for the folder."""
        with self._slot(job), workdir() as folder:
            watch.started("here")
            return run_job(job, folder, lambda: self._cancelled, watch)

    def cancel(self) -> None:
        """Kill what runs, within `TICK_S`, and refuse what comes."""
        self._cancelled = True

    @contextmanager
    def _slot(self, job: Job) -> Iterator[None]:
        while not self._slots.acquire(timeout=TICK_S):
            self._refuse_when_cancelled(job)
        try:
            self._refuse_when_cancelled(job)
            yield
        finally:
            self._slots.release()

    def _refuse_when_cancelled(self, job: Job) -> None:
        if self._cancelled:
            raise StepError(f"{job.name}: cancelled before it started", "cancelled")
