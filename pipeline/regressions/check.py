"""Builds what a spec asks for and judges it against what a channel serves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.reports.proof import PASSED, describe
from enginesmith.core.text import format_metric, join_first, now
from enginesmith.registry.evidence.latencies import read_latency_report, speeds_of
from enginesmith.registry.manifest import EngineEntry
from pipeline.compile.composition import Run
from pipeline.compile.run_context import RunContext
from pipeline.outcome import JudgedUnit
from pipeline.regressions.findings import EnginePair, Finding, MetricPair, RegressionCheck, ServedVersion
from pipeline.regressions.pairs import CheckOptions, PairMeasurement, key_of
from pipeline.spec.document import line_of, load_document
from pipeline.spec.model import KIND
from pipeline.values import Selection
from validation.latency.machine import machine
from validation.limits.budget import at_most
from validation.plotting import seconds_text

# From what was measured to findings: pure rules, each with a name (`findings.RULES`).
#
# A slowdown is a regression where the lower end of the ratio's 95 % interval is above the threshold: of an engine whose
# median is slower by exactly the threshold, one timing in 40 says so. What could not have been shown is said.


def judge_units(units: Sequence[JudgedUnit]) -> Iterator[Finding]:
    """A finding for each unit that failed, with its first failed checks."""
    for unit in units:
        if unit.entry.status == "failed":
            failure_texts = [describe(check) for check in unit.report.checks if not check.passed] if unit.report else []
            failure_text = join_first(failure_texts, 2, "; ") if failure_texts else unit.entry.reason.splitlines()[0]
            yield Finding("failed", "error", f"failed: {failure_text}", unit.built.unit.name)


def judge_coverage(
    old_entries: Sequence[EngineEntry], new: Sequence[EngineEntry], target_names: Sequence[str], name: str
) -> Iterator[Finding]:
    """A finding for each target that a served version has engines for, and the new one has none; of a target that
    keeps one, a note for each unit that is no longer built.

    old_entries, new: usable entries.  target_names: the targets that were asked for.  name: the served version.
    """
    targets, units = {entry.target for entry in new}, {entry.unit for entry in new}
    for target in dict.fromkeys(entry.target for entry in old_entries if entry.target in target_names):
        if target not in targets:
            yield Finding("coverage", "error", f"{name} has an engine for {target}, and this spec builds none", target)
            continue
        missing_units = [entry.unit for entry in old_entries if entry.target == target and entry.unit not in units]
        for unit in missing_units:
            yield Finding("coverage", "note", f"{name} has this engine, and this spec does not build it", unit)


def judge_pair(pair: EnginePair, options: CheckOptions, judged_by_metric: bool) -> Iterator[Finding]:
    """The findings on a pair of engines. judged_by_metric: whether a task metric of the spec has a limit."""
    interface_text = next((text for text in pair.remarks if text.startswith("its ")), None)
    if interface_text:
        yield Finding("interface", "error", f"{interface_text}; requests for one do not fit the other", pair.unit)
        return
    for metric in filter(_lost, pair.metrics):
        new_text = "cannot be measured" if metric.new is None else format_metric(metric.name, metric.new)
        old_text = f"{format_metric(metric.name, metric.served or 0.0)} ({pair.against})"
        message = f"{metric.name} {new_text}, served version {old_text}; the limit is {metric.allowed:g} worse"
        yield Finding("metric", "error", message, pair.unit)
    drift_fails = options.drift == "fail" or (options.drift == "auto" and not judged_by_metric)
    failed_drifts = [drift for drift in pair.drift if not drift.passed]
    for drift in failed_drifts[:1]:
        value_text = "cannot be compared" if drift.value is None else f"{drift.value:.4g}"
        limit_text = "" if drift.limit is None else f", limit {drift.limit:.4g}"
        cases_text = f" (in {len(failed_drifts)} of {len(pair.drift)} cases)" if len(pair.drift) > 1 else ""
        message = f"outputs differ from the served engine's: {drift.metric} of {drift.output} {value_text}"
        message += f"{limit_text}{cases_text}"
        message += "; the task metric decides" if not drift_fails and options.drift == "auto" else ""
        yield Finding("drift", "error" if drift_fails else "note", message, pair.unit, drift.case)
    yield from _judge_times(pair, options)
    yield from (Finding("not-compared", "warning", text, pair.unit) for text in pair.remarks)


def _lost(metric: MetricPair) -> bool:
    """Whether a metric of the new engine is worse by more than is allowed; NaN and none count as that."""
    if metric.served is None:
        return False
    if metric.new is None:
        return True
    loss = metric.new - metric.served if at_most(metric.name.partition(" of ")[0]) else metric.served - metric.new
    return not loss <= metric.allowed


def _judge_times(pair: EnginePair, options: CheckOptions) -> Iterator[Finding]:
    noisy_buckets = []
    for times in pair.times:
        if times.ratio is None or times.low is None or times.high is None:
            noisy_buckets.append(f"{times.bucket} (too few runs)")
        elif times.low > 1 + options.slower:
            time_text = f"{seconds_text(times.new_s)}, served version {seconds_text(times.served_s)} ({pair.against})"
            interval_text = f"{times.ratio:.3f} times the time (95 %: {times.low:.3f} to {times.high:.3f})"
            message = f"{time_text}: {interval_text}; over {1 + options.slower:.3g} is a regression"
            yield Finding("latency", "error", message, pair.unit, times.bucket)
        elif times.high > 1 + options.slower:
            noisy_buckets.append(f"{times.bucket} (up to {times.high:.3f} times)")
    if noisy_buckets:
        busy_note = next((f"; the machine was busy: {times.busy[0]}" for times in pair.times if times.busy), "")
        message = (
            f"a slowdown over {100 * options.slower:g} % is neither shown nor ruled out at {', '.join(noisy_buckets)}"
        )
        yield Finding("too-noisy", "warning", f"{message}; give more --seconds{busy_note}", pair.unit)


# Builds what a spec asks for as a build does, up to the publication, and compares it with what a channel serves.
#
# No version is made and no channel moves: the run ends where a build would begin to publish. What it leaves in the
# registry are the records of its steps with their blobs, as `enginesmith plan` and `enginesmith backends compare` leave
# them, so that the build after the merge finds the engines (docs/guides/regressions.md).


def check(run: Run, baseline: ServedVersion | None, this_machine: Machine, options: CheckOptions) -> RegressionCheck:
    """Build, prove and compare; findings have their line in the spec. this_machine: where it runs.  baseline: None for
    the first version of a model.

    Raises what exporting and quantizing raise; an engine that fails is a finding.
    """
    spec, context = run.spec, run.context
    result = run.time(run.build_and_prove(run.prepare()))
    units = result.units
    # As a publication would have them; nothing is published.
    entries = [entry for entry, _ in run.draft(result).approved]
    findings, pairs = list(judge_units(units)), list[EnginePair]()
    if baseline:
        target_names = [target.name for target in run.selection.targets or spec.target_list()]
        findings += judge_coverage(_select(baseline, run.selection), entries, target_names, baseline.manifest.reference)
        measurement = PairMeasurement(run, result.exported.golden, baseline, options)
        proven_units = {unit.built.unit.name: unit for unit in units if unit.entry.status in PASSED}
        pulled_unit = find_pulled(entries, units, this_machine, baseline.proven_only, context)
        pairs = list(_measure_pairs(measurement, proven_units, pulled_unit))
        has_limits = any(metric.limits for metric in spec.golden.metrics) if spec.golden else False
        findings += [finding for pair in pairs for finding in judge_pair(pair, options, has_limits)]
        paired_units = {pair.unit for pair in pairs}
        reason = f"{baseline.manifest.reference} serves no such engine here"
        findings += [Finding("not-compared", "note", reason, unit) for unit in proven_units if unit not in paired_units]
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.level))
    _, root = load_document(spec.path, KIND)
    return RegressionCheck(
        model=spec.model,
        spec=spec.address or str(spec.path),
        against=baseline.manifest.reference if baseline else None,
        channel=baseline.channel if baseline else None,
        machine=machine(),
        created_at=now(),
        slower=options.slower,
        seconds=options.seconds,
        statuses={unit.name: "refused" for unit in result.plan.refused}
        | {unit.built.unit.name: unit.entry.status for unit in units},
        pairs=tuple(pairs),
        findings=tuple(replace(finding, line=line_of(root, key_of(spec, finding))) for finding in findings),
    )


def _select(baseline: ServedVersion, selection: Selection) -> list[EngineEntry]:
    precisions, backends = selection.precisions, selection.backends
    return [
        entry
        for entry in baseline.served
        if (not precisions or entry.precision in precisions) and (not backends or entry.backend in backends)
    ]


def find_pulled(
    entries: Sequence[EngineEntry],
    units: Sequence[JudgedUnit],
    target_machine: Machine,
    proven_only: bool,
    context: RunContext,
) -> str | None:
    """The unit of the new version that a pull to this machine would select; None if none fits."""
    report_digests: Mapping[str, str] = {str(unit.built.digest): unit.latency for unit in units if unit.latency}
    reports = {digest: read_latency_report(context.store, report) for digest, report in report_digests.items()}

    def measured(fitting: Sequence[EngineEntry]) -> Mapping[str, object]:
        digests = {entry.digest for entry in fitting}
        return speeds_of({digest: report for digest, report in reports.items() if digest in digests})

    try:
        ranking = rank_engines(entries, target_machine, Policy(proven_only=proven_only), "the new version", measured)  # type: ignore[arg-type]
        return ranking.resolution().chosen.unit
    except UnknownNameError:
        return None


def _measure_pairs(
    measuring: PairMeasurement, proven: Mapping[str, JudgedUnit], pulled_unit: str | None
) -> Iterator[EnginePair]:
    """First the engines that both versions give this machine, then each other unit that both have."""
    baseline = measuring.served
    if pulled_unit is not None and pulled_unit in proven:
        yield measuring.measure(proven[pulled_unit], baseline.pulled, True)
    for unit, judged_unit in proven.items():
        if unit in baseline.here and (unit != pulled_unit or baseline.pulled.unit != unit):
            yield measuring.measure(judged_unit, baseline.here[unit], False)
