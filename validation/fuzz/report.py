"""The report of fuzzing one engine: every case with its verdict, and the smallest failing ones. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from enginery.core.reports.proof import Check
from validation.fuzz.cases import Values

CaseVerdict = Literal["ok", "refused", "not judged", "failed"]


@dataclass(frozen=True)
class FuzzedCase:
    """A case and what came of it. case: as `parse_only` reads it.  outside: no profile covers the sizes.

    failed: the checks that broke their limit.
    """

    sizes: Mapping[str, int]
    values: Values
    draw: int
    case: str
    outside: bool
    outcome: CaseVerdict
    reason: str
    failed: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class SmallestCase(FuzzedCase):
    """A failing case that was made small. from_: the case that was drawn.  reproduce: the command that tries this."""

    from_: str
    reproduce: str


@dataclass(frozen=True)
class FuzzReport:
    """All cases in order. passed: no case failed.  counts: of cases by verdict."""

    seed: int
    passed: bool
    counts: Mapping[CaseVerdict, int]
    cases: tuple[FuzzedCase, ...]
    smallest: tuple[SmallestCase, ...]
