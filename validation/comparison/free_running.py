"""Compares two models with state that hand their own states from step to step."""

from dataclasses import replace

from enginery.core.reports.proof import Check
from validation.comparison.sessions import drift_checks
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budgets, StagedLimits

# The case of these checks.
FREE_RUNNING = "free running"


def free_running_checks(
    stage: str,
    reference: FreeRunningSession | None,
    candidate: FreeRunningSession,
    sequences: GoldenSet,
    limits: Budgets | StagedLimits,
) -> tuple[Check, ...]:
    """`drift_checks` on whole sequences: those of the golden cases, under limits that were measured on sequences."""
    checks = drift_checks(stage, reference, candidate, sequences, limits)
    return tuple(replace(check, case=_case(check.case)) for check in checks)


def _case(name: str) -> str:
    return FREE_RUNNING if name == "golden" else f"{FREE_RUNNING}, {name}"
