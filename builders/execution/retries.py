"""Which failures of a job are worth another try: the same rules for every executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from builders.execution.jobs import Job, Result, Retrying, Watch
from enginesmith.core.errors import EnginesmithError, IntegrityError, StepError, UnavailableError

# How many tries, and what changes:
#
# | kind | tried again | with what changed |
# |---|---|---|
# | error, timeout, cancelled, no-node | no | the same would happen |
# | crash | once, on a cluster | on another node, if one suits; on a lone host what crashes crashes again |
# | memory (its own limit) | once, if it can be reduced | the reduced request; the limit is the user's and stays |
# | node-memory | once | the reduced request if there is one, and more memory asked of the scheduler |
# | node-lost | `MOST_LOST` times | elsewhere |

MOST_LOST = 3
# Memory to ask for over the measured peak: it is measured every `process.TICK_S`, and the next one may be higher.
_ROOM = 1.25
_ONCE = ("crash", "memory", "node-memory")


@dataclass(frozen=True)
class NextTry(Generic[Result]):
    """A job to be started once more. other_node: on another node than the last one, if there is one."""

    job: Job[Result]
    why: str
    other_node: bool = False


def run_with_retries(
    job: Job[Result], watch: Watch, attempt: Callable[[Job[Result], bool], Result], clustered: bool
) -> Result:
    """What `attempt(job, other_node)` returns, tried again by the rules above. clustered: whether there are more hosts.

    watch: gets each event of the job.
    Raises what `attempt` raises; after several tries with all their reasons, as StepError.
    """
    failures: list[StepError] = []
    on_other_node = False
    while True:
        try:
            return attempt(job, on_other_node)
        except StepError as error:
            failures.append(error)
            next_attempt = next_try(job, failures, clustered)
            if next_attempt is None:
                raise _summarize(failures) from error
        except (UnavailableError, IntegrityError):
            raise  # says nothing about the job
        except EnginesmithError as error:
            if not failures:
                raise
            raise _summarize([*failures, StepError(str(error))]) from error
        watch(Retrying(job.name, next_attempt.why))
        job, on_other_node = next_attempt.job, next_attempt.other_node


def next_try(job: Job[Result], failures: Sequence[StepError], clustered: bool) -> NextTry[Result] | None:
    """The try after these failures; None when another would not help."""
    kind = failures[-1].kind
    kind_count = sum(failure.kind == kind for failure in failures)
    if kind == "node-lost" and kind_count <= MOST_LOST:
        return NextTry(job, f"its node was lost; try {len(failures) + 1}, elsewhere", other_node=True)
    if kind_count > 1 or kind not in _ONCE:
        return None
    if kind == "crash":
        return NextTry(job, "it crashed; once more, elsewhere if a node suits", other_node=True) if clustered else None
    reduction = job.reduced
    if kind == "memory":
        return NextTry(reduce(job), f"it held too much memory; once more, {reduction.change}") if reduction else None
    larger_job = more_memory(reduce(job), failures[-1].peak_mib)
    change_text = f"{reduction.change}, " if reduction and reduction.change else ""
    changes_text = f"{change_text}with {larger_job.needs.memory_mib} MiB set aside for it"
    return NextTry(larger_job, f"its node ran out of memory; once more, {changes_text}")


def reduce(job: Job[Result]) -> Job[Result]:
    """The job with its reduced request, if it has one; there is no further reduction."""
    return replace(job, request=job.reduced.request, reduced=None) if job.reduced else job


def more_memory(job: Job[Result], peak_mib: float) -> Job[Result]:
    """The job with needs of twice the memory, or 1.25 times its measured peak where that is more, up to its limit."""
    request_mib = max(2 * job.needs.memory_mib, int(_ROOM * peak_mib))
    return replace(job, needs=replace(job.needs, memory_mib=min(request_mib, job.limits.memory_mib)))


def _summarize(failures: Sequence[StepError]) -> StepError:
    """The last failure, its message with the first lines of the earlier ones."""
    cause = failures[-1]
    if len(failures) == 1:
        return cause
    history = "; ".join(dict.fromkeys(str(failure).splitlines()[0] for failure in failures[:-1]))
    return StepError(
        f"{cause} (after {len(failures)} tries; before that: {history})", cause.kind, cause.log, cause.peak_mib
    )
