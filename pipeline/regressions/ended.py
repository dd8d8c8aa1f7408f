"""A check that an error ended, as a check whose findings are the mistakes, so that a pull request shows their lines."""

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.text import now
from pipeline.regressions.findings import RegressionCheck
from pipeline.regressions.lines import findings_of
from pipeline.regressions.thresholds import CheckOptions
from validation.latency.machine import machine


def ended_by(error: EnginesmithError, spec: str, options: CheckOptions) -> RegressionCheck:
    """The check of a spec that could not be read, built or compared."""
    return RegressionCheck(
        model=spec,
        spec=spec,
        against=None,
        channel=None,
        machine=machine(),
        created_at=now(),
        slower=options.slower,
        seconds=options.seconds,
        statuses={},
        pairs=(),
        findings=tuple(findings_of(error)),
    )
