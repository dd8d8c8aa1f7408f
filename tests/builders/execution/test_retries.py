from dataclasses import replace

import pytest

from builders.execution.jobs import (
    MOST_LOST,
    Job,
    JobEvent,
    Needs,
    ProcessLimits,
    ReducedRequest,
    Retrying,
    ignore_event,
    more_memory,
    next_try,
    run_with_retries,
)
from enginesmith.core.errors import ModelError, StepError, UnavailableError
from tests.calls import Call, call_job

LIMITED = {"limits": ProcessLimits(memory_mib=4096), "needs": Needs(memory_mib=1000)}
PLAIN = call_job("unit", "m:f", {"x": 1}, **LIMITED)
REDUCED = Call("m:f", {"x": 1, "workspace_mib": 512})
LEAN = replace(PLAIN, reduced=ReducedRequest(REDUCED, "with workspace_mib 512"))


def failed(*kinds: str, peak_mib: float = 0.0) -> list[StepError]:
    return [StepError(f"unit: {kind}", kind, "log", peak_mib) for kind in kinds]


@pytest.mark.parametrize(
    ("job", "kinds", "clustered", "again"),
    [
        (LEAN, ["error"], True, False),
        (LEAN, ["timeout"], True, False),
        (LEAN, ["cancelled"], True, False),
        (LEAN, ["no-node"], True, False),
        (PLAIN, ["crash"], True, True),
        (PLAIN, ["crash"], False, False),
        (PLAIN, ["crash", "crash"], True, False),
        (PLAIN, ["memory"], True, False),
        (LEAN, ["memory"], False, True),
        (LEAN, ["memory", "memory"], True, False),
        (PLAIN, ["node-memory"], True, True),
        (PLAIN, ["node-memory", "node-memory"], True, False),
        (PLAIN, ["node-lost"] * MOST_LOST, True, True),
        (PLAIN, ["node-lost"] * (MOST_LOST + 1), True, False),
        (PLAIN, ["node-lost", "crash"], True, True),
    ],
)
def test_only_errors_that_a_retry_may_fix_are_retried(job, kinds, clustered, again):
    assert (next_try(job, failed(*kinds), clustered) is not None) is again


def test_a_crash_and_a_lost_node_retry_elsewhere():
    for kind in ("crash", "node-lost"):
        following_try = next_try(PLAIN, failed(kind), True)
        assert following_try and following_try.other_node and following_try.job == PLAIN


def test_a_job_out_of_memory_is_retried_reduced_with_its_limit():
    following_try = next_try(LEAN, failed("memory"), False)
    assert following_try and not following_try.other_node
    assert following_try.job.request == REDUCED and following_try.job.reduced is None
    assert following_try.job.limits == LEAN.limits and following_try.job.needs == LEAN.needs
    assert "with workspace_mib 512" in following_try.why


def test_a_node_out_of_memory_also_gets_a_larger_reservation():
    following_try = next_try(LEAN, failed("node-memory", peak_mib=2000), True)
    assert following_try and following_try.job.needs.memory_mib == 2500 and following_try.job.request == REDUCED
    assert following_try.why.endswith("with workspace_mib 512, with 2500 MiB set aside for it")


@pytest.mark.parametrize(("peak", "mib"), [(0.0, 2000), (1900.0, 2375), (9999.0, 4096)])
def test_more_memory_is_twice_as_much_or_the_peak_plus_a_margin(peak, mib):
    assert more_memory(PLAIN, peak).needs.memory_mib == mib


def test_the_last_failure_names_the_earlier_ones():
    error = failed("node-lost", "crash", "crash")
    output, tries = list[JobEvent](), list[bool]()

    def attempt(job: Job, other_node: bool) -> None:
        tries.append(other_node)
        raise error.pop(0)

    with pytest.raises(StepError) as failure:
        run_with_retries(PLAIN, output.append, attempt, clustered=True)
    assert str(failure.value) == "unit: crash (after 3 tries; before that: unit: node-lost; unit: crash)"
    assert (failure.value.kind, failure.value.log) == ("crash", "log")
    assert tries == [False, True, True] and [type(event) for event in output] == [Retrying, Retrying]


def test_a_single_failure_is_raised_unchanged():
    (error,) = failed("timeout")

    def attempt(job: Job, other_node: bool) -> None:
        raise error

    with pytest.raises(StepError) as failure:
        run_with_retries(PLAIN, ignore_event, attempt, clustered=True)
    assert failure.value is error


@pytest.mark.parametrize(("error", "is_kept"), [(ModelError("too small"), False), (UnavailableError("no store"), True)])
def test_another_error_on_the_second_try_does_not_hide_the_first(error, is_kept):
    errors = [*failed("crash"), error]

    def attempt(job: Job, other_node: bool) -> None:
        raise errors.pop(0)

    with pytest.raises(type(error) if is_kept else StepError) as failure:
        run_with_retries(PLAIN, ignore_event, attempt, clustered=True)
    assert str(failure.value) == ("no store" if is_kept else "too small (after 2 tries; before that: unit: crash)")
