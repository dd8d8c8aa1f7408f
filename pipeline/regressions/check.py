"""Builds what a spec asks for as a build does, up to the publication, and compares it with what a channel serves.

No version is made and no channel moves: the run ends where a build would begin to publish. What it leaves in the
registry are the records of its steps with their blobs, as `enginesmith plan` and `enginesmith backends compare` leave
them, so that the build after the merge finds the engines (docs/guides/regressions.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.text import now
from enginesmith.registry.evidence.latencies import read_latency_report, speeds_of
from enginesmith.registry.manifest import EngineEntry
from pipeline.compile.composition import Run
from pipeline.compile.run_context import RunContext
from pipeline.outcome import JudgedUnit
from pipeline.regressions.findings import EnginePair, Finding, RegressionCheck
from pipeline.regressions.judge import judge_coverage, judge_pair, judge_units
from pipeline.regressions.pairs import PairMeasurement
from pipeline.regressions.served import ServedVersion
from pipeline.regressions.thresholds import CheckOptions
from pipeline.spec.model import ModelSpec
from pipeline.values import Selection
from validation.latency.machine import machine


def check(run: Run, served: ServedVersion | None, here: Machine, options: CheckOptions) -> RegressionCheck:
    """Build, prove and compare. here: this machine.  served: None for the first version of a model.

    Raises what exporting and quantizing raise; an engine that fails is a finding.
    """
    spec, context = run.spec, run.context
    done = run.time(run.build_and_prove(run.prepare()))
    judged = done.units
    # As a publication would have them; nothing is published.
    entries = [entry for entry, _ in run.draft(done).approved]
    findings, pairs = list(judge_units(judged)), list[EnginePair]()
    if served:
        selected = [target.name for target in run.selection.targets or spec.target_list()]
        findings += judge_coverage(_select(served, run.selection), entries, selected, served.name)
        measuring = PairMeasurement(run, done.exported.golden, served, options)
        proven = {item.built.unit.name: item for item in judged if item.verdict == "proven"}
        pulled = find_pulled(entries, judged, here, served.proven_only, context)
        pairs = list(_measure_pairs(measuring, proven, pulled))
        limited = any(metric.limits() for metric in spec.golden.metrics) if spec.golden else False
        findings += [found for pair in pairs for found in judge_pair(pair, options, limited)]
        findings += _list_uncompared(proven, pairs, served)
    findings += list_left_out(spec)
    return RegressionCheck(
        model=spec.model,
        spec=spec.address or str(spec.path),
        against=served.name if served else None,
        channel=served.channel if served else None,
        machine=machine(),
        created_at=now(),
        slower=options.slower,
        seconds=options.seconds,
        statuses={unit.name: "refused" for unit in done.plan.refused}
        | {item.built.unit.name: item.verdict for item in judged},
        pairs=tuple(pairs),
        findings=tuple(sorted(findings, key=lambda found: ("error", "warning", "note").index(found.level))),
    )


def list_left_out(spec: ModelSpec) -> Iterator[Finding]:
    """A note on what the spec asks for and a check does not look at."""
    if spec.compile_cache:
        yield Finding("not-compared", "note", "the compile cache is neither made nor compared here")


def _select(served: ServedVersion, selection: Selection) -> list[EngineEntry]:
    """The served engines of the precisions and backends that were asked for."""
    precisions, backends = selection.precisions, selection.backends
    return [
        entry
        for entry in served.served
        if (not precisions or entry.precision in precisions) and (not backends or entry.backend in backends)
    ]


def find_pulled(
    entries: Sequence[EngineEntry], judged: Sequence[JudgedUnit], here: Machine, proven_only: bool, context: RunContext
) -> str | None:
    """The unit that this machine would be given of the new version; None where none fits."""
    timed: Mapping[str, str] = {str(item.built.digest): item.latency for item in judged if item.latency}
    reports = {digest: read_latency_report(context.store, report) for digest, report in timed.items()}

    def measured(fitting: Sequence[EngineEntry]) -> Mapping[str, object]:
        digests = {entry.digest for entry in fitting}
        return speeds_of({digest: report for digest, report in reports.items() if digest in digests})

    try:
        ranking = rank_engines(entries, here, Policy(proven_only=proven_only), "the new version", measured)  # type: ignore[arg-type]
        return ranking.resolution().chosen.unit
    except UnknownNameError:
        return None


def _measure_pairs(
    measuring: PairMeasurement, proven: Mapping[str, JudgedUnit], pulled: str | None
) -> Iterator[EnginePair]:
    """First what this machine is given by both versions, then each other unit that both have."""
    served = measuring.served
    if pulled is not None and pulled in proven:
        yield measuring.measure(proven[pulled], served.pulled, True)
    for unit, item in proven.items():
        if unit in served.here and (unit != pulled or served.pulled.unit != unit):
            yield measuring.measure(item, served.here[unit], False)


def _list_uncompared(
    proven: Mapping[str, JudgedUnit], pairs: Sequence[EnginePair], served: ServedVersion
) -> Iterator[Finding]:
    compared = {pair.unit for pair in pairs}
    for unit in proven:
        if unit not in compared:
            yield Finding("not-compared", "note", f"{served.name} serves no such engine here", unit)


def with_lines(found: RegressionCheck, lines: Mapping[Finding, int]) -> RegressionCheck:
    """The check with the lines of the spec that its findings are about."""
    return replace(found, findings=tuple(replace(item, line=lines.get(item)) for item in found.findings))
