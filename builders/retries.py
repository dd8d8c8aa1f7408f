"""Which failures of a job are worth another try, how many, and what changes: the same rules for every executor.

| kind | tried again | with what changed |
|---|---|---|
| error, timeout, cancelled, no-node | no | the same would happen |
| crash | once, on a cluster | on another node, if one suits; on a lone host what crashes crashes again |
| memory (its own limit) | once, if it can be leaner | leaner arguments; the limit is the user's and stays |
| node-memory | once | leaner arguments, and more memory asked of the scheduler |
| node-lost | `MOST_LOST` times | elsewhere |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from builders.errors import EngineryError, IntegrityError, StepError, UnavailableError
from builders.jobs import Job, Watch

MOST_LOST = 3
# A peak is measured every `process.TICK_S`: the next one may lie above it.
_ROOM = 1.25
_ONCE = ("crash", "memory", "node-memory")


@dataclass(frozen=True)
class NextTry:
    """A job to be started once more. elsewhere: on another node than the last one, if there is one."""

    job: Job
    why: str
    elsewhere: bool = False


def run_with_retries(job: Job, watch: Watch, attempt: Callable[[Job, bool], Any], clustered: bool) -> Any:
    """What `attempt(job, elsewhere)` returns, tried again by the rules above. clustered: whether there are more hosts.

    Raises what `attempt` raises; after several tries with all their reasons, as StepError.
    """
    failures: list[StepError] = []
    elsewhere = False
    while True:
        try:
            return attempt(job, elsewhere)
        except StepError as error:
            failures.append(error)
            following = next_try(job, failures, clustered)
            if following is None:
                raise _all_of(failures) from error
        except (UnavailableError, IntegrityError):
            raise  # says nothing about the job
        except EngineryError as error:
            if not failures:
                raise
            raise _all_of([*failures, StepError(str(error))]) from error
        watch.retrying(following.why)
        job, elsewhere = following.job, following.elsewhere


def next_try(job: Job, failures: Sequence[StepError], clustered: bool) -> NextTry | None:
    """The try after these failures; None when another would not help."""
    kind = failures[-1].kind
    times = sum(failure.kind == kind for failure in failures)
    if kind == "node-lost" and times <= MOST_LOST:
        return NextTry(job, f"its node was lost; try {len(failures) + 1}, elsewhere", elsewhere=True)
    if times > 1 or kind not in _ONCE:
        return None
    if kind == "crash":
        return NextTry(job, "it crashed; once more, elsewhere if a node suits", elsewhere=True) if clustered else None
    if kind == "memory":
        return NextTry(leaner(job), f"it held too much memory; once more, {_changes(job)}") if job.leaner else None
    wanted = more_memory(leaner(job), failures[-1].peak_mib)
    changes = ", ".join(filter(None, (_changes(job), f"with {wanted.needs.memory_mib} MiB set aside for it")))
    return NextTry(wanted, f"its node ran out of memory; once more, {changes}")


def leaner(job: Job) -> Job:
    """The job with the arguments that save memory; leaner than that it cannot be."""
    return replace(job, arguments={**job.arguments, **job.leaner}, leaner={})


def more_memory(job: Job, peak_mib: float) -> Job:
    """The job asking for twice the memory, and for what it was seen to hold, with room; no more than its limit."""
    wanted = max(2 * job.needs.memory_mib, int(_ROOM * peak_mib))
    return replace(job, needs=replace(job.needs, memory_mib=min(wanted, job.limits.memory_mib)))


def _changes(job: Job) -> str:
    return ", ".join(f"with {name} {value}" for name, value in job.leaner.items())


def _all_of(failures: Sequence[StepError]) -> StepError:
    """The last failure, which names the earlier ones."""
    last = failures[-1]
    if len(failures) == 1:
        return last
    before = "; ".join(dict.fromkeys(str(failure).splitlines()[0] for failure in failures[:-1]))
    return StepError(f"{last} (after {len(failures)} tries; before that: {before})", last.kind, last.log, last.peak_mib)
