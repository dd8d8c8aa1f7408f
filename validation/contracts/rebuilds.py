"""Whether building the same again gives the same: bytes of the engines, digests of their outputs, and their spread.

Nobody is promised equal bytes: compilers choose kernels by measuring, and write times and paths. What is held is that
the outputs of all rebuilds stay within the limits of drift of each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginery.core.proof.report import Check
from validation.comparison.sessions import case_checks
from validation.contracts.repeats import digest
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budgets


@dataclass(frozen=True)
class Rebuilt:
    """One build: the digest of its engine, and what it answered, as the expected outputs of a golden set."""

    engine: str
    answers: GoldenSet


def reproducibility(built: Sequence[Rebuilt], budgets: Budgets) -> dict[str, Any]:
    """The report as JSON: the first build is compared with the others, case by case.

    engines: how often each digest came.  outputs: per output the number of distinct answers (over all cases), whether
    all bits are equal, the least SQNR in decibels (null: equal) and the greatest absolute difference.
    """
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
    return {
        "times": len(built),
        "byte_equal": len(set(engines)) == 1,
        "engines": {name: engines.count(name) for name in dict.fromkeys(engines)},
        "outputs": {
            output: {
                "distinct": len(found),
                "bit_equal": len(found) == 1,
                "sqnr_db": _extreme(checks, output, "sqnr_db", min),
                "max_abs": _extreme(checks, output, "max_abs", max),
            }
            for output, found in distinct.items()
        },
        "passed": not failed,
        "failed": [check.to_json() for check in failed],
    }


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


def _extreme(checks: Sequence[Check], output: str, name: str, of: Any) -> float | None:
    found = [
        check.value for check in checks if (check.output, check.name) == (output, name) and check.value is not None
    ]
    finite = [value for value in found if math.isfinite(value)]
    return float(of(finite)) if finite else None
