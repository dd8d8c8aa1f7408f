"""From what was measured to findings: pure rules, each with a name (`findings.RULES`).

A slowdown is a regression where the lower end of the ratio's 95 % interval is above the threshold: of an engine whose
median is slower by exactly the threshold, one timing in 40 says so. What could not have been shown is said.
"""

from collections.abc import Iterator, Sequence

from enginesmith.core.reports.proof import describe
from enginesmith.core.text import format_metric, join_first
from enginesmith.registry.manifest import EngineEntry
from pipeline.outcome import JudgedUnit
from pipeline.regressions.findings import EnginePair, Finding, MetricPair
from pipeline.regressions.thresholds import CheckOptions
from validation.limits.budget import at_most
from validation.plots.texts import seconds_text


def judge_units(judged: Sequence[JudgedUnit]) -> Iterator[Finding]:
    """A finding for each unit that failed, with its first failed checks."""
    for item in judged:
        if item.verdict == "failed":
            broken = [describe(check) for check in item.report.checks if not check.passed] if item.report else []
            told = join_first(broken, 2, "; ") if broken else item.reason.splitlines()[0]
            yield Finding("failed", "error", f"failed: {told}", item.built.unit.name)


def judge_coverage(
    served: Sequence[EngineEntry], new: Sequence[EngineEntry], selected: Sequence[str], what: str
) -> Iterator[Finding]:
    """A finding for each target that a served version has engines for, and the new one has none; of a target that
    keeps one, a note for each unit that is no longer built.

    served, new: usable entries.  selected: the targets that were asked for.  what: the served version.
    """
    targets, units = {entry.target for entry in new}, {entry.unit for entry in new}
    for target in dict.fromkeys(entry.target for entry in served if entry.target in selected):
        if target not in targets:
            yield Finding("coverage", "error", f"{what} has an engine for {target}, and this spec gives none", target)
            continue
        gone = [entry.unit for entry in served if entry.target == target and entry.unit not in units]
        for unit in gone:
            yield Finding("coverage", "note", f"{what} has this engine, and this spec does not give it", unit)


def judge_pair(pair: EnginePair, options: CheckOptions, judged_by_metric: bool) -> Iterator[Finding]:
    """The findings on a pair of engines. judged_by_metric: whether a task metric of the spec has a limit."""
    interface = next((text for text in pair.remarks if text.startswith("its ")), None)
    if interface:
        yield Finding("interface", "error", f"{interface}; requests to the one do not fit the other", pair.unit)
        return
    yield from (_judge_metric(pair, item) for item in pair.metrics if _lost(item))
    yield from _judge_drift(pair, options, judged_by_metric)
    yield from _judge_times(pair, options)
    yield from (Finding("not-compared", "warning", text, pair.unit) for text in pair.remarks)


def _lost(item: MetricPair) -> bool:
    """Whether a metric of the new engine is worse by more than is allowed; NaN and none count as that."""
    if item.served is None:
        return False
    if item.new is None:
        return True
    loss = item.new - item.served if at_most(item.name.partition(" of ")[0]) else item.served - item.new
    return not loss <= item.allowed


def _judge_metric(pair: EnginePair, item: MetricPair) -> Finding:
    new = "cannot be measured" if item.new is None else format_metric(item.name, item.new)
    served = format_metric(item.name, item.served or 0.0)
    message = f"{item.name} {new}, {served} as served ({pair.against}); at most {item.allowed:g} worse passes"
    return Finding("metric", "error", message, pair.unit)


def _judge_drift(pair: EnginePair, options: CheckOptions, judged_by_metric: bool) -> Iterator[Finding]:
    fails = options.drift == "fail" or (options.drift == "auto" and not judged_by_metric)
    broken = [item for item in pair.drift if not item.passed]
    for item in broken[:1]:
        value = "cannot be compared" if item.value is None else f"{item.value:.4g}"
        limit = "" if item.limit is None else f", limit {item.limit:.4g}"
        cases = f" (in {len(broken)} of {len(pair.drift)} cases)" if len(pair.drift) > 1 else ""
        message = f"answers other than the served engine: {item.metric} of {item.output} {value}{limit}{cases}"
        if not fails:
            message += "; the task metric decides" if options.drift == "auto" else ""
        yield Finding("drift", "error" if fails else "note", message, pair.unit, item.case)


def _judge_times(pair: EnginePair, options: CheckOptions) -> Iterator[Finding]:
    noisy = []
    for times in pair.times:
        if times.ratio is None or times.low is None or times.high is None:
            noisy.append(f"{times.bucket} (too few runs)")
        elif times.low > 1 + options.slower:
            told = f"{seconds_text(times.new_s)}, {seconds_text(times.served_s)} as served ({pair.against})"
            interval = f"{times.ratio:.3f} times the time (95 %: {times.low:.3f} to {times.high:.3f})"
            message = f"{told}: {interval}; over {1 + options.slower:.3g} is a regression"
            yield Finding("latency", "error", message, pair.unit, times.bucket)
        elif times.high > 1 + options.slower:
            noisy.append(f"{times.bucket} (up to {times.high:.3f} times)")
    if noisy:
        busy = next((f"; the machine was busy: {times.busy[0]}" for times in pair.times if times.busy), "")
        message = f"a slowdown over {100 * options.slower:g} % is neither shown nor ruled out at {', '.join(noisy)}"
        yield Finding("too-noisy", "warning", f"{message}; give more --seconds{busy}", pair.unit)
