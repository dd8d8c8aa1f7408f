"""Whether building the same again gives the same: bytes of the engines, digests of their outputs, and their spread.

Nobody is promised equal bytes: compilers choose kernels by measuring, and write times and paths. What is held is that
the outputs of all rebuilds stay within the limits of drift of each other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core.codec import encode_document
from enginery.core.reports.proof import Check
from validation.comparison.sessions import case_checks
from validation.contracts.repeats import digest
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budgets


@dataclass(frozen=True)
class Rebuilt:
    """One build: the digest of its engine, and what it answered, as the expected outputs of a golden set."""

    engine: str
    answers: GoldenSet


@dataclass(frozen=True)
class OutputSpread:
    """How one output of several builds differs. distinct: the number of different answers, over all cases.

    sqnr_db, max_abs: the least SQNR in decibels, and the greatest absolute difference; None where nothing finite was
    measured.
    """

    distinct: int
    bit_equal: bool
    sqnr_db: float | None
    max_abs: float | None


@dataclass(frozen=True)
class Reproducibility:
    """What several builds of one engine share. engines: how often each digest came.  outputs: by name.

    passed: whether the outputs are within the limits of drift of each other.  failed: the checks that are not.
    """

    times: int
    byte_equal: bool
    engines: Mapping[str, int]
    outputs: Mapping[str, OutputSpread]
    passed: bool
    failed: tuple[Check, ...]

    def to_json(self) -> dict[str, object]:
        """What `enginery rebuild --json` prints of it."""
        return encode_document(self)


def reproducibility(built: Sequence[Rebuilt], budgets: Budgets) -> Reproducibility:
    """Compare the first build with the others, case by case."""
    engines = [item.engine for item in built]
    distinct: dict[str, set[str]] = {}
    for item in built:
        said: dict[str, list[str]] = {}
        for case in item.answers.cases:
            for output, array in case.expected.items():
                said.setdefault(output, []).append(digest(array))
        for output, digests in said.items():
            distinct.setdefault(output, set()).add(" ".join(digests))
    checks = [check for other in built[1:] for check in _against(built[0].answers, other.answers, budgets)]
    failed = [check for check in checks if not check.passed]
    outputs = {
        output: OutputSpread(
            distinct=len(found),
            bit_equal=len(found) == 1,
            sqnr_db=min(_finite(checks, output, "sqnr_db"), default=None),
            max_abs=max(_finite(checks, output, "max_abs"), default=None),
        )
        for output, found in distinct.items()
    }
    counts = {name: engines.count(name) for name in dict.fromkeys(engines)}
    return Reproducibility(len(built), len(set(engines)) == 1, counts, outputs, not failed, tuple(failed))


def _against(first: GoldenSet, other: GoldenSet, budgets: Budgets) -> list[Check]:
    checks: list[Check] = []
    for left, right in zip(first.cases, other.cases, strict=True):
        for output, expected in left.expected.items():
            budget = budgets.of(output, left.kind, expected.size)
            try:
                checks += case_checks("engine", left.name, output, expected, right.expected[output], budget)
            except (KeyError, ValueError) as error:
                checks.append(Check("engine", "outputs", output, left.name, None, None, False, str(error)))
    return checks


def _finite(checks: Sequence[Check], output: str, name: str) -> list[float]:
    values = [check.value for check in checks if (check.output, check.name) == (output, name)]
    return [float(value) for value in values if value is not None and math.isfinite(value)]
