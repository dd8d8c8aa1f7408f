"""How much drift is allowed, per stage, precision and model. Reason of each number: docs/concepts/validation.md.

Limits that are measured only where an engine needs them.

What an honest kernel's rounding adds to a graph takes longer to measure than most engines take to prove. It only ever
loosens the strictest limits that it can give, so checks are made with those first, and again with measured ones where
some fail: the verdict is the one that measured limits give.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from enginery.core.errors import InputError
from enginery.core.reports.proof import Check
from enginery.core.text import suggest
from enginery.core.types import Precision
from validation.limits.noise_floor import Noise, OutputFloor
from validation.limits.rounding import Decisions, Honest
from validation.metrics.drift import Drift

Stage = Literal["export", "quantization", "engine", "task"]


# A margin of two in amplitude above honest rounding; four for the greatest error,
# which grows with the number of samples.
HONEST_DB, EXTREME = 20 * math.log10(2), 4.0
# Four for a graph against the fp32 model: one way to round, and in a single sample another one may be twice as far.
CAST_DB = 2 * HONEST_DB


@dataclass(frozen=True)
class Budget:
    """Limits; None is not checked, though its value is still reported.

    max_abs, max_rel: at most (max_rel is relative to the output's peak).  sqnr_db, centered_sqnr_db (against the
    output's variation over the samples), slice_sqnr_db (of the worst slice), quartile_sqnr_db (that three of four
    golden samples have), cosine, argmax_agreement: at least.
    """

    max_abs: float | None = None
    max_rel: float | None = None
    sqnr_db: float | None = None
    centered_sqnr_db: float | None = None
    slice_sqnr_db: float | None = None
    quartile_sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None

    def override(self, limits: Mapping[str, float | None]) -> "Budget":
        """The budget with some limits replaced; None lifts one. Raises InputError for an unknown name or value."""
        for name, value in limits.items():
            _check_limit(name, value)
        return replace(self, **{name: None if value is None else float(value) for name, value in limits.items()})

    def with_sqnr(self, sqnr_db: float | None) -> "Budget":
        """With another SQNR, and slices and variation as far below it as before, if not more."""
        limits = {"sqnr_db": sqnr_db}
        for name in ("centered_sqnr_db", "slice_sqnr_db"):
            before = getattr(self, name)
            below = sqnr_db is not None and before is not None and self.sqnr_db is not None
            limits[name] = min(before, before + sqnr_db - self.sqnr_db) if below else None
        return self.override(limits)

    def items(self) -> list[tuple[str, float | None]]:
        """(metric, limit) pairs in order."""
        return [(item.name, getattr(self, item.name)) for item in fields(self)]


@dataclass(frozen=True)
class Budgets:
    """The budget of each output in each kind of case. measured: where it follows from the model and not from a table.

    notes: by output and kind, where a limit comes from.  decisions: of integers, what an honest kernel changes.
    """

    default: Budget
    measured: Mapping[tuple[str, str], Budget] = field(default_factory=dict)
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    decisions: Mapping[str, Decisions] = field(default_factory=dict)

    def of(self, output: str, kind: str, elements: int = 0) -> Budget:
        """The budget of an output in a kind of case. elements: of integers, how many are compared."""
        found = self.measured.get((output, kind), self.default)
        if output not in self.decisions:
            return found
        return replace(found, argmax_agreement=self.decisions[output].limit(kind, elements))

    @property
    def tightest(self) -> Budget:
        """The budget with the highest SQNR that any output is held to: what a part of the model is held to."""
        budgets = self.measured.values() or (self.default,)
        return max(budgets, key=lambda budget: -math.inf if budget.sqnr_db is None else budget.sqnr_db)

    def override(self, limits: Mapping[str, float | None]) -> "Budgets":
        """What a spec says, everywhere, in the place of what is documented or measured.

        Whoever gives `sqnr_db` speaks of all the energy of an error: nothing of it that was measured then holds, and
        its share in slices and in the variation follows. Raises InputError as `Budget.override` does.
        """
        decisions = {} if "argmax_agreement" in limits else self.decisions
        default, measured = self.default, self.measured
        if "sqnr_db" in limits:
            default, measured = default.with_sqnr(limits["sqnr_db"]), {}
        told = {(output, "golden") for output in decisions} | measured.keys()
        return Budgets(
            default.override(limits),
            {key: budget.override(limits) for key, budget in measured.items()},
            {key: note for key, note in self.notes.items() if key in told},
            decisions,
        )


def budgets(stage: Stage, precision: Precision, noise: Noise | None, honest: Honest | None = None) -> Budgets:
    """The limits of a stage for one model: what its noise floor or honest rounding allows, else the documented ones.

    honest: of the graph that is the stage's reference. Both tighten and loosen; SQNR never below LEAST_DB.
    """
    default = default_budget(stage, precision)
    if stage == "task":
        return Budgets(default)
    rounded: Precision = "fp32" if stage == "export" else precision
    measured: dict[tuple[str, str], Budget] = {}
    notes: dict[tuple[str, str], str] = {}
    for key, floor in _floors(noise) if rounded in ROUNDING_DB else ():
        measured[key], notes[key] = _above_floor(default, rounded, floor)
    for key, drift in (honest.drifts if honest else {}).items():
        if rounded == "fp32":
            measured[key] = _with_slices(measured.get(key, default), drift)
        else:
            measured[key], notes[key] = _above_honest(stage, default, rounded, drift)
    if rounded == "fp32" or honest is None:
        return Budgets(default, measured, notes)
    if stage == "engine":
        for output, sqnr_db in honest.most_samples.items():
            key = output, "golden"
            measured[key] = _with_quartile(measured.get(key, default), sqnr_db)
    notes |= {(output, "golden"): str(decisions) for output, decisions in honest.decisions.items()}
    return Budgets(default, measured, notes, honest.decisions)


def strictest(stage: Stage, precision: Precision, noise: Noise | None) -> Budgets:
    """The limits of a model whose honest rounding is least: those of `budgets` are never above them."""
    found, rounded = budgets(stage, precision, noise), "fp32" if stage == "export" else precision
    if rounded != "fp32":
        held = _above_honest(stage, found.default, rounded, EXACT)[0]
        return Budgets(_with_quartile(held, math.inf) if stage == "engine" else held)
    measured = {key: _with_slices(budget, EXACT) for key, budget in found.measured.items()}
    return Budgets(_with_slices(found.default, EXACT), measured, found.notes)


def _floors(noise: Noise | None) -> Iterator[tuple[tuple[str, str], OutputFloor]]:
    for output, kinds in (noise.floors if noise else {}).items():
        for kind, floor in kinds.items():
            yield (output, kind), floor


def _above_floor(default: Budget, rounded: str, floor: OutputFloor) -> tuple[Budget, str]:
    below = ROUNDING_DB[rounded] + MARGIN_DB[rounded]
    sqnr_db = min(floor.sqnr_db, MOST_DB) - below
    if rounded == "fp32" and default.sqnr_db is not None:
        sqnr_db = max(sqnr_db, min(default.sqnr_db, floor.sqnr_db - LOOSE_DB))
    sqnr_db = _least(sqnr_db)
    max_rel = max(default.max_rel or 0.0, min(floor.max_rel * 10 ** (below / 20), 1.0))
    note = f"float32's own noise is {floor.sqnr_db:.0f} dB below this output"
    return replace(default, sqnr_db=sqnr_db, max_rel=max_rel), note + _describe_loosening(default, sqnr_db)


def _above_honest(stage: Stage, default: Budget, rounded: str, drift: Drift) -> tuple[Budget, str]:
    margin = HONEST_DB if stage == "engine" else CAST_DB
    sqnr_db = _limit_from_honest(drift.sqnr_db, margin)
    max_rel = min(max(drift.max_rel, 10 ** (-(MOST_DB - MARGIN_DB["fp32"]) / 20)) * EXTREME, 1.0)
    times = "twice" if margin == HONEST_DB else "four times"
    note = f"honest {rounded} rounding is {drift.sqnr_db:.0f} dB below this output; {times} that"
    if drift.sqnr_db < LEAST_DB:
        note = f"honest {rounded} rounding drowns this output"
    budget = replace(default, sqnr_db=sqnr_db, max_rel=max_rel)
    return _with_slices(budget, drift, margin), note + _describe_loosening(default, sqnr_db)


def _with_slices(budget: Budget, drift: Drift, margin: float = HONEST_DB) -> Budget:
    """Each slice is held to the SQNR of the whole, or to what `drift_checks` allows it by its own honest rounding."""
    if not drift.centered_sq:
        return replace(budget, slice_sqnr_db=budget.sqnr_db)
    return replace(
        budget, slice_sqnr_db=budget.sqnr_db, centered_sqnr_db=_limit_from_honest(drift.centered_sqnr_db, margin)
    )


def _with_quartile(budget: Budget, honest_db: float) -> Budget:
    return replace(budget, quartile_sqnr_db=_limit_from_honest(honest_db, HONEST_DB))


def _limit_from_honest(honest_db: float, margin: float) -> float:
    """The limit that honest rounding gives: with a margin, and as if it were no less than float32's noise."""
    return _least(min(honest_db, MOST_DB - MARGIN_DB["fp32"]) - margin)


def _least(sqnr_db: float) -> float:
    return round(max(sqnr_db, LEAST_DB), 1)


def _describe_loosening(default: Budget, sqnr_db: float) -> str:
    return f" (looser than {default.sqnr_db:g})" if default.sqnr_db is not None and sqnr_db < default.sqnr_db else ""


def at_most(name: str) -> bool:
    """Whether a metric's limit is an upper one (errors); the others are lower ones (likenesses)."""
    return name.startswith("max_") or name == "nonfinite"


def within(name: str, value: float, limit: float) -> bool:
    """Whether a metric's value keeps its limit. NaN keeps none."""
    return value <= limit if at_most(name) else value >= limit


# Decibels between the rounding unit of a precision and that of float32: 13 and 16 bits less.
ROUNDING_DB: Mapping[str, float] = {"fp32": 0.0, "fp16": 20 * math.log10(2**13), "bf16": 20 * math.log10(2**16)}
# What an engine may add to its arithmetic's noise floor by other kernels and other orders of summation. For fp32 a
# factor of 32: Winograd's convolutions cost up to 20 dB (Barabasz et al., "Error Analysis and Improving the Accuracy of
# Winograd Convolution for Deep Neural Networks", 2020); TF32 or fp16 in its place cost 60 and more.
MARGIN_DB: Mapping[str, float] = {"fp32": 30.0, "fp16": 12.0, "bf16": 12.0}
# The margin where a floor loosens fp32's documented limit: what Winograd's convolutions cost, and no more.
LOOSE_DB = 20.0
# The drift of a kernel that adds nothing.
EXACT = Drift(count=1, expected_sq=1.0, centered_sq=1.0)
# An answer that explains less than half of an output is none.
LEAST_DB = 3.0
# Floors above it say that an output holds few roundings or none (a copy, a count), and nothing about what others cost.
MOST_DB = 140.0


def default_budget(stage: Stage, precision: Precision) -> Budget:
    """The documented limits. Export is always fp32; the task's floor comes from the spec, so nothing is set here."""
    if stage == "task":
        return Budget()
    return _DEFAULTS["fp32" if stage == "export" else precision]


# Of graphs and engines alike: what a precision costs, where nothing was measured on the model.
_DEFAULTS: dict[Precision, Budget] = {
    "fp32": Budget(max_rel=1e-3, sqnr_db=80.0, centered_sqnr_db=60.0, slice_sqnr_db=60.0),
    "fp16": Budget(max_rel=0.03, sqnr_db=45.0, centered_sqnr_db=30.0, slice_sqnr_db=30.0),
    "bf16": Budget(max_rel=0.2, sqnr_db=25.0, centered_sqnr_db=15.0, slice_sqnr_db=15.0),
    "fp8": Budget(max_rel=0.6, sqnr_db=15.0, centered_sqnr_db=10.0, slice_sqnr_db=8.0),
    "int8": Budget(max_rel=0.6, sqnr_db=15.0, centered_sqnr_db=10.0, slice_sqnr_db=8.0),
    "int8-dynamic": Budget(max_rel=0.6, sqnr_db=15.0, centered_sqnr_db=10.0, slice_sqnr_db=8.0),
    "int4": Budget(max_rel=0.9, sqnr_db=10.0, centered_sqnr_db=6.0, slice_sqnr_db=4.0),
}


def _check_limit(name: str, value: object) -> None:
    known = [item.name for item in fields(Budget)]
    if name not in known:
        raise InputError(f"limit {name!r} is not a metric; {suggest(name, known)}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and not math.isnan(float(str(value)))):
        raise InputError(f"limit {name}: {value!r} is not a number; give one, or null to lift the limit")


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
