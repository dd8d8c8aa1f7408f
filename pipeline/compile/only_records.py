"""Answering from the records alone: an executor that runs nothing, and what it says instead."""

from typing import NoReturn

from builders.execution.events import Watch, ignore_event
from builders.execution.jobs import Job, Result


class NotOnRecord(Exception):  # noqa: N818 - no error: it says that there is work to do
    """A step is not on record; its text names the job."""


class OnlyRecords:
    """An executor that runs nothing."""

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Raise NotOnRecord."""
        raise NotOnRecord(job.name)

    def cancel(self) -> None:
        """There is nothing to stop."""
