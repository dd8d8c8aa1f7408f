"""A check as rows of tables, and as Markdown for the summary of a run or a comment on a pull request."""

from collections.abc import Sequence

from enginesmith.core.text import format_metric, visible
from pipeline.regressions.findings import BucketTimes, EnginePair, MetricPair, RegressionCheck
from validation.plots.texts import seconds_text

COLUMNS = ("engine", "against", "what", "new", "served", "verdict")
MARKS = {"error": "regression", "warning": "warning", "note": "note"}


def list_rows(check: RegressionCheck) -> list[list[str]]:
    """Rows of COLUMNS: for each pair its metrics, its answers and its times."""
    return [row for pair in check.pairs for row in _list_rows_of(check, pair)]


def _list_rows_of(check: RegressionCheck, pair: EnginePair) -> list[list[str]]:
    head = [pair.unit + (" (what is pulled here)" if pair.pulled else ""), pair.against]
    if pair.same:
        return [[*head, "bytes", "", "", "equal"]]
    bad = {(found.rule, found.bucket) for found in check.findings if found.unit == pair.unit and found.level == "error"}
    rows = [[*head, item.name, *_values(item), "worse" if ("metric", "") in bad else "kept"] for item in pair.metrics]
    broken = [item for item in pair.drift if not item.passed]
    if pair.drift:
        held = f"other in {len(broken)} of {len(pair.drift)} cases" if broken else f"alike in {len(pair.drift)} cases"
        rows.append([*head, "answers", "", "", held])
    for times in pair.times:
        rows.append([*head, f"latency at {times.bucket}", *_times(times), describe_ratio(times, check.slower)])
    return rows


def _values(item: MetricPair) -> list[str]:
    return ["" if value is None else format_metric(item.name, value) for value in (item.new, item.served)]


def _times(times: BucketTimes) -> list[str]:
    return [seconds_text(times.new_s), seconds_text(times.served_s)]


def describe_ratio(times: BucketTimes, slower: float) -> str:
    """'slower: 1.41 times (1.38 to 1.44)'. slower: the threshold, as a share."""
    if times.ratio is None or times.low is None or times.high is None:
        return "too few runs"
    word = "slower" if times.low > 1 + slower else "faster" if times.high < 1 else "no slowdown shown"
    word = "too noisy" if times.low <= 1 + slower < times.high else word
    return f"{word}: {times.ratio:.3f} times ({times.low:.3f} to {times.high:.3f})"


def to_markdown(check: RegressionCheck) -> str:
    """A heading with the verdict, the findings, and a table of what was measured."""
    lines = [f"### enginesmith check: {_plain(check.verdict)}", ""]
    for found in check.findings:
        lines.append(f"- **{MARKS[found.level]}** ({found.rule}): {_plain(found.text)}")
    if check.findings:
        lines.append("")
    if rows := list_rows(check):
        lines += _table(COLUMNS, rows)
    rest = ", ".join(f"{unit} {status}" for unit, status in check.statuses.items())
    if rest:
        lines += [f"Units: {_plain(rest)}.", ""]
    lines.append(
        f"On {_plain(str(check.machine))}, {check.created_at}. Slower: the lower end of the 95 % interval of the ratio "
        f"is over {1 + check.slower:.3g}; {check.seconds:g} s of interleaved runs for each bucket."
    )
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(map(_plain, row))} |" for row in rows), ""]


def _plain(text: str) -> str:
    """A text without what Markdown or HTML would read, in one line."""
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return " ".join(visible(text).split())
