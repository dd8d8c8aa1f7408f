"""Answering from the records alone: an executor that runs nothing, and what it says instead."""

from typing import NoReturn

from builders.execution.jobs import UNWATCHED, Job, Result, Watch


class NotOnRecord(Exception):  # noqa: N818 - no error: it says that there is work to do
    """A step is not on record; its text names the job."""


class OnlyRecords:
    """An executor that runs nothing."""

    def run(self, job: Job[Result], watch: Watch = UNWATCHED) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Raise NotOnRecord."""
        raise NotOnRecord(job.name)

    def cancel(self) -> None:
        """There is nothing to stop."""
