"""The report on one unit: the checks of its three stages, the verdict, and what it was reached with."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginery.core.hardware.machine import describe_host
from enginery.core.hardware.targets import this_kind
from enginery.core.reports.proof import Report, Verdict, judge
from enginery.core.text import now
from pipeline.values import Attributed, Built, Proof


@dataclass(frozen=True)
class JudgedUnit:
    """A unit at the end of its way: with a report, or with the failure of its build.

    attributed: which node drifted, where a check failed.  latency: digest of the latency report of an engine that runs
    here, as a blob.
    """

    built: Built
    report: Report | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    attributed: tuple[Attributed, ...] = ()
    latency: str | None = None

    @property
    def verdict(self) -> Verdict:
        """'proven', 'unproven' or 'failed'."""
        return self.report.verdict if self.report else "failed"

    @property
    def reason(self) -> str:
        """What stands behind the verdict."""
        if self.report:
            return self.report.reason
        return self.built.failure.reason if self.built.failure else "it was not built"


def make_report(
    built: Built, golden: str, proofs: Sequence[Proof], cannot_run: str | None, cpu: str | None = None
) -> Report:
    """Judge all checks together.

    cannot_run: why the engine could not be run, None when it was run.  cpu: the kind of CPU it was run on; None is this
    machine's. The reason names it for a CPU engine, since the verdict holds for that kind alone.
    """
    checks = tuple(check for proof in proofs for check in proof.checks)
    verdict, reason = judge(checks, cannot_run)
    request = built.unit.request
    if request.target.is_cpu and cannot_run is None:
        reason = f"{reason}, on {cpu or this_kind().name}"
    return Report(
        unit=request.unit,
        target=request.target.name,
        precision=request.precision,
        backend=request.backend,
        engine=built.digest,
        golden=golden,
        checks=checks,
        verdict=verdict,
        reason=reason,
        created_at=now(),
        host=describe_host(),
        versions=dict(request.toolchain),
        spreads=tuple(spread.round_numbers() for proof in proofs for spread in proof.spreads),
    )
