"""The lines of a spec that findings are about, and findings from the mistakes of a spec, which say their lines: also
of a check that an error ended."""

import re
from collections.abc import Iterator, Sequence

from enginesmith.core.errors import EnginesmithError, SpecError
from enginesmith.core.text import now
from pipeline.regressions.findings import Finding, Key, RegressionCheck
from pipeline.regressions.thresholds import CheckOptions
from pipeline.spec.document import load_document
from pipeline.spec.mistakes import line_of
from pipeline.spec.model import KIND, ModelSpec
from validation.latency.machine import machine

_LINE = re.compile(r"^(?P<path>.*?):(?P<line>\d+): (?P<text>.*)$", re.DOTALL)


def find_lines(spec: ModelSpec, findings: Sequence[Finding]) -> dict[Finding, int]:
    """The line of each finding: of its precision or target, of the golden set for what is about answers."""
    _, root = load_document(spec.path, KIND)
    return {found: line_of(root, key_of(spec, found)) for found in findings}


def key_of(spec: ModelSpec, found: Finding) -> Key:
    """The key of a spec that a finding is about."""
    if found.rule == "metric" and spec.golden:
        return ("golden", "metric")
    if found.rule == "interface":
        return ("inputs",) if found.message.startswith("its inputs") else ("outputs",)
    target, _, rest = found.unit.partition(" ")
    precision = rest.partition(" ")[0]
    if found.rule != "coverage" and precision in spec.precision_list():
        given = list(spec.precisions) if isinstance(spec.precisions, tuple | list) else []
        return ("precisions", given.index(precision)) if precision in given else ("precisions",)
    named = list(spec.targets)
    return ("targets", named.index(target)) if target in named else ("targets",)


def findings_of(error: EnginesmithError) -> Iterator[Finding]:
    """A finding for each mistake that ended a check, with its line where it says one."""
    for entry in error.lines if isinstance(error, SpecError) else [str(error)]:
        found = _LINE.match(entry)
        if isinstance(error, SpecError) and found:
            yield Finding("spec", "error", found["text"], line=int(found["line"]))
        else:
            yield Finding("spec", "error", entry)


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
