"""Limits that are measured only where an engine needs them.

What an honest kernel's rounding adds to a graph takes longer to measure than most engines take to prove. It only ever
loosens the strictest limits that it can give, so checks are made with those first, and again with measured ones where
some fail: the verdict is the one that measured limits give.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from enginery.core.reports.proof import Check
from validation.limits.budget import Budget, Budgets
from validation.metrics.drift import Drift


@dataclass(frozen=True)
class OutputLimits:
    """What each output is held to. honest: by output and kind of case, the drift that an honest kernel adds."""

    budgets: Budgets
    honest: Mapping[tuple[str, str], Drift] = field(default_factory=dict)

    @classmethod
    def of(cls, given: "Budget | Budgets | OutputLimits") -> "OutputLimits":
        """Limits of whatever says how much drift is allowed."""
        if isinstance(given, OutputLimits):
            return given
        return cls(Budgets(given) if isinstance(given, Budget) else given)

    def at(self, output: str, kind: str, elements: int) -> tuple[Budget, Drift | None]:
        """The budget of an output of so many elements in a kind of case, and the drift that an honest kernel adds
        there, where known."""
        return self.budgets.of(output, kind, elements), self.honest.get((output, kind))


@dataclass
class StagedLimits:
    """Limits in use, and looser ones in order, each made when it is asked for."""

    current: OutputLimits
    looser: Iterator[OutputLimits] = field(default_factory=lambda: iter(()))

    @classmethod
    def of(cls, given: "Budget | Budgets | OutputLimits | StagedLimits") -> "StagedLimits":
        """Limits that stay, or those that are given in stages."""
        return given if isinstance(given, StagedLimits) else cls(OutputLimits.of(given))

    def judge(self, checks: Callable[[OutputLimits], Iterable[Check]]) -> tuple[Check, ...]:
        """The checks of the first limits that all of them keep, else of the loosest. Those of others are not made
        beyond one that fails, because edges take time."""
        found: list[Check] = []
        held = iter(checks(self.current))
        while check := next(held, None):
            found.append(check)
            if not check.passed and self._loosen():
                found, held = [], iter(checks(self.current))
        return tuple(found)

    def loosest(self) -> OutputLimits:
        """The limits that a failed check is held to."""
        while self._loosen():
            pass
        return self.current

    def _loosen(self) -> bool:
        before = self.current
        self.current = next(self.looser, before)
        return self.current is not before
