"""Shared objects of a run's steps: artifact store, executors, progress display, records of past work.

A step is keyed by the content of everything it reads: files, spec values, the code that its request can reach
(`closure`) and the versions of the packages that this code imports. A key that is on record is answered from
the record, so that a run with nothing to do imports nothing heavy.
"""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar

from builders.backends.installed_versions import versions_of
from builders.execution.jobs import Executor, Job, Result, Watch, ignore_event, result_type
from enginesmith.core.codec import decode, encode_fields
from enginesmith.core.errors import EnginesmithError, IntegrityError, SpecError, StepError, UnavailableError, digest_of
from enginesmith.core.text import now
from enginesmith.registry.builds.build_history import History, hold_build_lock
from enginesmith.registry.builds.runs import StoredRecords, remember
from enginesmith.registry.store.base import Store
from pipeline.progress.events import Finished, Progress, Waiting
from pipeline.values import EVERYTHING, Selection, StepFailure

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec  # with pydantic, which no worker needs

Recalled = TypeVar("Recalled")


@dataclass(frozen=True)
class RunContext:
    """What the steps of a run share. executor: builds engines, on any machine.  local: runs everything else here:
    steps that read the spec's files, and proofs, because a proof shows that an engine runs on this machine.

    started_at: when the run began here (ISO 8601, UTC), for its provenance.  copies: copies of the store's records,
    read instead of the store.  foresees: whether the run is only forecast; then unrecorded steps may stay unknown.
    """

    foresees: ClassVar[bool] = False
    store: Store
    local: Executor
    executor: Executor
    progress: Progress = field(default_factory=Progress)
    started_at: str = field(default_factory=now)
    copies: StoredRecords | None = None

    @cached_property
    def history(self) -> History:
        """Times of earlier builds; read when the first unit is built, and kept for the run."""
        return History(self.store)

    def recall(
        self,
        kind: str,
        key: Mapping[str, object],
        result: type[Recalled],
        sizes: Callable[[Recalled], Mapping[str, int]] | None = None,
    ) -> Recalled | None:
        """The value on record for a step's key; None when the step must run, or the record cannot be read.

        sizes: of blobs in bytes by digest, as `records.recall` takes them.
        """
        decoded_values = list[Recalled]()

        def measure(value: dict[str, object]) -> Mapping[str, int]:
            decoded_values.append(decode(value, result))
            return sizes(decoded_values[0]) if sizes else {}

        with suppress(IntegrityError):
            stored_record = (self.copies or StoredRecords(self.store)).recall(kind, digest_of(key), measure)
            return decoded_values[0] if stored_record is not None else None
        return None

    def remember(self, kind: str, key: Mapping[str, object], value: Mapping[str, object], blobs: list[str]) -> None:
        """Put a finished step on record. Its blobs are stored already, so a kill in between loses only the record.

        kind: of the step.  key: everything that the step read, as JSON.  value: its result, as JSON.
        """
        remember(self.store, kind, digest_of(key), dict(value), blobs)

    def once(
        self,
        kind: str,
        name: str,
        key: Mapping[str, object],
        job: Job[Result],
        blobs: Callable[[Result], Sequence[str]] = lambda _: (),
        run: Callable[[Executor, str, Job[Result]], Result] | None = None,
    ) -> Result:
        """Answer from the record, or run the job in a process of its own and put its result on record.

        blobs: digests of the blobs that a result names.  run: instead of `run_job` on this host, for a step that may be
        carried out elsewhere.
        """
        if (record_value := self.recall(kind, key, result_type(job.request))) is not None:
            self.progress.emit(Finished(name, "cached"))
            return record_value
        value = (run or self.run_job)(self.local, name, job)
        self.remember(kind, key, encode_fields(value), list(blobs(value)))
        self.progress.emit(Finished(name))  # only now, so that reported results survive a kill
        return value

    def run_job(self, executor: Executor, name: str, job: Job[Result]) -> Result:
        """Run a job in an executor and emit its events under `name`, from the moment when it leaves the queue."""
        with self.progress.watch(name):
            return executor.run(job, lambda event: self.progress.emit(replace(event, name=name)))

    def run_to_end(
        self, executor: Executor, name: str, job: Job[Result], words: Callable[[Result], str] = lambda _: ""
    ) -> Result:
        """Run a job as `run_job` does, and emit that it is done. words: describes its result.  executor: where it
        runs."""
        value = self.run_job(executor, name, job)
        self.progress.emit(Finished(name, words=words(value)))
        return value


@dataclass(frozen=True)
class Work:
    """A spec, the context to work on it in, and the selected part of it: the argument of every step."""

    spec: "ModelSpec"
    context: RunContext
    selection: Selection = EVERYTHING


def versions(*distributions: str) -> dict[str, str]:
    """Installed versions; 'absent' for missing packages."""
    package_versions = versions_of(*distributions)
    return {name: package_versions.get(name, "absent") for name in distributions}


def version_of(name: str) -> str:
    """A distribution's version as installed now, or 'absent'."""
    return versions(name)[name]


def import_versions(*packages: str) -> dict[str, str]:
    """Installed versions of packages by the name that `import` takes, which may not be the distribution's."""
    package_versions = {name: version_of(name) for name in packages}
    for name in packages:
        if package_versions[name] == "absent":
            owners = sorted(set(importlib.metadata.packages_distributions().get(name, ())))
            package_versions[name] = ", ".join(f"{owner} {version_of(owner)}" for owner in owners) or "absent"
    return package_versions


@contextmanager
def hold_lock(context: RunContext, name: str, lock_name: str) -> Iterator[None]:
    """Hold a build lock (`hold_build_lock`), and emit as events its holder while waiting, and the time waited."""
    started_s, holders = time.monotonic(), list[str]()

    def note(holder: str) -> None:
        holders.append(holder)
        context.progress.emit(Waiting("lock", holder))

    with hold_build_lock(context.store, name, lock_name, note):
        if holders:
            context.progress.emit(Finished("lock", reason=f"waited {time.monotonic() - started_s:.0f} s"))
        yield


def stops_run(error: EnginesmithError) -> bool:
    """Whether an error must end the run, because its cause is not the step's input: a service is unreachable, a blob is
    damaged, or the step was cancelled."""
    is_cancelled = isinstance(error, StepError) and error.kind == "cancelled"
    return is_cancelled or isinstance(error, UnavailableError | IntegrityError)


def fail_step(name: str, error: EnginesmithError, context: RunContext) -> StepFailure:
    """The failure that replaces a step's result, so that only steps that need the result fail.

    Raises the error itself if it must end the run (`stops_run`), and for mistakes in a spec's files, which concern the
    whole run.
    """
    if stops_run(error) or isinstance(error, SpecError):
        raise error
    reason = str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
    context.progress.emit(Finished(name, "failed", reason.removeprefix(f"{name}: ").splitlines()[0]))
    kind, log = (error.kind, error.log) if isinstance(error, StepError) else ("error", "")
    return StepFailure(reason, kind, log)


class NotOnRecord(Exception):  # noqa: N818 - no error: it says that there is work to do
    """A step is not on record; its text names the job."""


class OnlyRecords:
    """An executor that runs nothing: a run context with it reads results from the records alone."""

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Raise NotOnRecord."""
        raise NotOnRecord(job.name)

    def cancel(self) -> None:
        """Do nothing: no job runs."""
