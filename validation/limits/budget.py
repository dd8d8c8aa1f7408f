"""Limits of drift per stage, precision and model. docs/concepts/validation.md has the reason of each number.

Limits from honest rounding are measured only if an engine needs them: the measurement takes longer than validating
most engines. Measured limits are never stricter than `strictest`. Checks use the strictest limits first, and measured
ones only if a check fails (`StagedLimits`): the verdict is the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from enginesmith.core.reports.proof import DECISIONS, Check
from enginesmith.core.types import TRAITS, Precision
from validation.limits.noise_floor import Noise, OutputFloor
from validation.limits.rounding import Decisions, Honest, NearTies
from validation.limits.terms import Budget
from validation.metrics.drift import Drift

Stage = Literal["export", "quantization", "engine", "task"]

# Margins over honest rounding, in decibels. For an engine: twice the amplitude. For a quantized graph: four times,
# since a graph rounds in one way, and in a single sample another way of rounding may be twice as far off.
HONEST_DB = 20 * math.log10(2)
CAST_DB = 2 * HONEST_DB
# One in this many elements of an int8 state may be off by a step, because values may be near a tie.
NEAR_TIES = 100
# The factor over the greatest error of honest rounding, which grows with the number of samples.
EXTREME = 4.0
# Decibels between the rounding unit of a precision and that of float32: 13 and 16 bits less.
ROUNDING_DB: Mapping[str, float] = {"fp32": 0.0, "fp16": 20 * math.log10(2**13), "bf16": 20 * math.log10(2**16)}
# Margins over an arithmetic's noise floor, for other kernels and other orders of summation. For fp32 a factor of 32:
# Winograd's convolutions cost up to 20 dB (Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd
# Convolution for Deep Neural Networks", 2020); TF32 or fp16 instead of fp32 cost 60 dB or more.
MARGIN_DB: Mapping[str, float] = {"fp32": 30.0, "fp16": 12.0, "bf16": 12.0}
# The margin if a floor loosens fp32's documented limit: only the cost of Winograd's convolutions.
LOOSE_DB = 20.0
# The lowest limit of an SQNR: at 3 dB the error has half the energy of the output.
LEAST_DB = 3.0
# Noise floors and honest rounding count as at most this SQNR: an output with a higher one had few roundings or none (a
# copy, a count), which says nothing about the cost of other roundings.
MOST_DB = 140.0
# The drift of a kernel that adds nothing.
EXACT = Drift(count=1, expected_sq=1.0, centered_sq=1.0)


def default_budget(stage: Stage, precision: Precision) -> Budget:
    """The documented limits of a precision, for graphs and engines, if nothing was measured on the model.
    The export stage has the limits of fp32. The task stage has none here: its floor is in the spec."""
    if stage == "task":
        return Budget()
    return Budget(**TRAITS["fp32" if stage == "export" else precision].limits._asdict())


def at_most(name: str) -> bool:
    """Whether a metric's limit is an upper limit (errors) and not a lower one (similarities)."""
    return name.startswith("max_") or name.endswith("_error") or name in ("nonfinite", "perplexity")


def within(name: str, value: float, limit: float) -> bool:
    """Whether a metric's value keeps its limit. NaN keeps none."""
    return value <= limit if at_most(name) else value >= limit


@dataclass(frozen=True)
class Budgets:
    """The budget of each output in each kind of case ('golden', 'edge').

    measured: by output and kind, the budgets measured on the model; the others have the default.
    notes: by output and kind, the origin of the limits.  decisions: by integer output, how many of its elements an
    honest kernel changes.
    """

    default: Budget
    measured: Mapping[tuple[str, str], Budget] = field(default_factory=dict)
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    decisions: Mapping[str, Decisions | NearTies] = field(default_factory=dict)

    def of(self, output: str, kind: str, elements: int = 0) -> Budget:
        """The budget of an output in a kind of case. elements: number of compared elements, if they are integers."""
        budget = self.measured.get((output, kind), self.default)
        if output not in self.decisions:
            return budget
        return replace(budget, argmax_agreement=self.decisions[output].limit(kind, elements))

    @property
    def tightest(self) -> Budget:
        """The budget with the highest SQNR of all outputs; parts of a model must keep it."""
        budgets = self.measured.values() or (self.default,)
        return max(budgets, key=lambda budget: -math.inf if budget.sqnr_db is None else budget.sqnr_db)

    def override(self, limits: Mapping[str, float | None]) -> "Budgets":
        """The budgets of every output, with documented and measured limits replaced by the limits of a spec.

        `sqnr_db` limits all the energy of an error: it replaces all measured budgets, and the limits on slices and
        variation change with it. Raises InputError as `Budget.override` does.
        """
        decisions = {} if DECISIONS in limits else self.decisions
        default, overrides = self.default, self.measured
        if "sqnr_db" in limits:
            default, overrides = default.with_sqnr(limits["sqnr_db"]), {}
        valid_keys = {(output, "golden") for output in decisions} | overrides.keys()
        return Budgets(
            default.override(limits),
            {key: budget.override(limits) for key, budget in overrides.items()},
            {key: note for key, note in self.notes.items() if key in valid_keys},
            decisions,
        )


def budgets(stage: Stage, precision: Precision, noise: Noise | None, honest: Honest | None = None) -> Budgets:
    """The limits of a stage for one model, from its noise floor and honest rounding, else the documented limits.

    noise: the noise floor of float32.  honest: the rounding of an honest kernel in the graph that is the stage's
    reference. Both can tighten and loosen limits; the limit of the SQNR is never below LEAST_DB.
    precision: of the engine or graph.
    """
    default = default_budget(stage, precision)
    if stage == "task":
        return Budgets(default)
    noise_precision: Precision = "fp32" if stage == "export" else precision
    output_budgets: dict[tuple[str, str], Budget] = {}
    notes: dict[tuple[str, str], str] = {}
    for output, kind_floors in (noise.floors if noise and noise_precision in ROUNDING_DB else {}).items():
        for kind, floor in kind_floors.items():
            output_budgets[output, kind], notes[output, kind] = _above_floor(default, noise_precision, floor)
    floor_budgets = dict(output_budgets)
    for key, drift in (honest.drifts if honest else {}).items():
        if noise_precision == "fp32":  # an edge of its own has the noise floor of all edges
            kind_default = default if key[1] == "golden" else floor_budgets.get((key[0], "edge"), default)
            output_budgets[key] = _with_slices(output_budgets.get(key, kind_default), drift)
        else:
            output_budgets[key], notes[key] = _above_honest(stage, default, noise_precision, drift)
    if noise_precision == "fp32" or honest is None:
        return Budgets(default, output_budgets, notes)
    if stage == "engine":
        for output, sqnr_db in honest.most_samples.items():
            key = output, "golden"
            output_budgets[key] = _with_quartile(output_budgets.get(key, default), sqnr_db)
    notes |= {(output, "golden"): str(decisions) for output, decisions in honest.decisions.items()}
    return Budgets(default, output_budgets, notes, honest.decisions)


def allow_near_ties(budgets: Budgets, scales: Mapping[str, float], drifts: Mapping[tuple[str, str], Drift]) -> Budgets:
    """The budgets, changed for outputs that are multiples of a scale, such as int8 states.

    scales: output -> scale.  drifts: (output, kind of case) -> drift of honest rounding.  A near tie changes an element
    by a whole step, and the number of near ties is random: one element in `NEAR_TIES`, anywhere, may be off by a step,
    and slices have no limits. A wrong row, head or channel is a far larger error."""
    tie_budgets, notes = dict(budgets.measured), dict(budgets.notes)
    for (output, kind), drift in drifts.items():
        if output in scales and drift.expected_sq:
            budget, step = tie_budgets.get((output, kind), budgets.default), scales[output]
            bound = 10 * math.log10(NEAR_TIES * drift.expected_sq / (drift.count * step**2))
            sqnr_db = round(max(min(bound, budget.sqnr_db or bound), LEAST_DB), 1)
            max_rel = max(budget.max_rel or 0.0, min(1.0, 2 * step / math.sqrt(drift.expected_sq / drift.count)))
            no_limits = {"slice_sqnr_db": None, "centered_sqnr_db": None, "quartile_sqnr_db": None}
            tie_budgets[output, kind] = replace(budget, sqnr_db=sqnr_db, max_rel=max_rel, **no_limits)
            notes[output, kind] = f"int8: one element in {NEAR_TIES} may be a step of {step:.3g} off"
    return replace(budgets, measured=tie_budgets, notes=notes)


def strictest(stage: Stage, precision: Precision, noise: Noise | None) -> Budgets:
    """The limits if honest rounding adds no error; `budgets` never returns stricter ones."""
    base_budgets, noise_precision = budgets(stage, precision, noise), "fp32" if stage == "export" else precision
    if noise_precision != "fp32":
        honest_budget = _above_honest(stage, base_budgets.default, noise_precision, EXACT)[0]
        return Budgets(_with_quartile(honest_budget, math.inf) if stage == "engine" else honest_budget)
    slice_budgets = {key: _with_slices(budget, EXACT) for key, budget in base_budgets.measured.items()}
    return Budgets(_with_slices(base_budgets.default, EXACT), slice_budgets, base_budgets.notes)


def _above_floor(default: Budget, rounding: str, floor: OutputFloor) -> tuple[Budget, str]:
    """The budget that follows from a noise floor in a precision, and a note on its origin."""
    margin_db = ROUNDING_DB[rounding] + MARGIN_DB[rounding]
    sqnr_db = min(floor.sqnr_db, MOST_DB) - margin_db
    if rounding == "fp32" and default.sqnr_db is not None:
        sqnr_db = max(sqnr_db, min(default.sqnr_db, floor.sqnr_db - LOOSE_DB))
    sqnr_db = round(max(sqnr_db, LEAST_DB), 1)
    max_rel = max(default.max_rel or 0.0, min(floor.max_rel * 10 ** (margin_db / 20), 1.0))
    note = f"float32's own noise is {floor.sqnr_db:.0f} dB below this output"
    return replace(default, sqnr_db=sqnr_db, max_rel=max_rel), note + _describe_loosening(default, sqnr_db)


def _above_honest(stage: Stage, default: Budget, rounding: str, drift: Drift) -> tuple[Budget, str]:
    """The budget that follows from the drift of honest rounding, and a note on its origin."""
    margin = HONEST_DB if stage == "engine" else CAST_DB
    sqnr_db = _limit_from_honest(drift.sqnr_db, margin)
    greatest_rel = max(drift.max_rel, 10 ** (-(MOST_DB - MARGIN_DB["fp32"]) / 20))
    if stage == "quantization":
        # A classifier's honest run has a few dozen elements, most of them saturated: their greatest error says little.
        # The relative error of one element may be at least the amplitude that the SQNR allows the whole output.
        greatest_rel = max(greatest_rel, 10 ** (-sqnr_db / 20))
    max_rel = min(greatest_rel * EXTREME, 1.0)
    times_text = "twice" if margin == HONEST_DB else "four times"
    note = f"honest {rounding} rounding is {drift.sqnr_db:.0f} dB below this output; {times_text} that"
    if drift.sqnr_db < LEAST_DB:
        note = f"honest {rounding} rounding drowns this output"
    budget = replace(default, sqnr_db=sqnr_db, max_rel=max_rel)
    return _with_slices(budget, drift, margin), note + _describe_loosening(default, sqnr_db)


def _with_slices(budget: Budget, drift: Drift, margin: float = HONEST_DB) -> Budget:
    """The budget with its `sqnr_db` also as the limit of slices (`worst_slice` allows each slice its own honest
    rounding), and with a limit on the variation, from honest rounding, if the output varies."""
    budget = replace(budget, slice_sqnr_db=budget.sqnr_db)
    if not drift.centered_sq:
        return budget
    return replace(budget, centered_sqnr_db=_limit_from_honest(drift.centered_sqnr_db, margin))


def _with_quartile(budget: Budget, honest_db: float) -> Budget:
    return replace(budget, quartile_sqnr_db=_limit_from_honest(honest_db, HONEST_DB))


def _limit_from_honest(honest_db: float, margin: float) -> float:
    """The limit for an SQNR of honest rounding (at most MOST_DB less fp32's margin), lower by `margin`; in decibels."""
    return round(max(min(honest_db, MOST_DB - MARGIN_DB["fp32"]) - margin, LEAST_DB), 1)


def _describe_loosening(default: Budget, sqnr_db: float) -> str:
    return f" (looser than {default.sqnr_db:g})" if default.sqnr_db is not None and sqnr_db < default.sqnr_db else ""


@dataclass(frozen=True)
class OutputLimits:
    """The limits of each output. honest: by output and kind of case or name of an edge, an honest kernel's drift."""

    budgets: Budgets
    honest: Mapping[tuple[str, str], Drift] = field(default_factory=dict)

    @classmethod
    def of(cls, limits: "Budget | Budgets | OutputLimits") -> "OutputLimits":
        """The limits from one budget for all outputs, or from `Budgets`; an OutputLimits is returned unchanged."""
        if isinstance(limits, OutputLimits):
            return limits
        return cls(Budgets(limits) if isinstance(limits, Budget) else limits)

    def at(self, output: str, kind: str, elements: int, case: str = "") -> tuple[Budget, Drift | None]:
        """The budget of an output of `elements` elements, and the drift of an honest kernel or None: of `case` if that
        case was measured, else of the kind of case."""
        kind = case if (output, case) in self.honest else kind
        return self.budgets.of(output, kind, elements), self.honest.get((output, kind))


@dataclass
class StagedLimits:
    """The limits in use, and looser ones in order, each measured when the iterator reaches it."""

    current: OutputLimits
    looser: Iterator[OutputLimits] = field(default_factory=lambda: iter(()))

    @classmethod
    def of(cls, limits: "Budget | Budgets | OutputLimits | StagedLimits") -> "StagedLimits":
        """The limits as a single stage; a StagedLimits is returned unchanged."""
        return limits if isinstance(limits, StagedLimits) else cls(OutputLimits.of(limits))

    def judge(self, checks: Callable[[OutputLimits], Iterable[Check]]) -> tuple[Check, ...]:
        """The checks under the first limits that all checks pass, else under the loosest limits.

        Only the loosest limits are checked beyond a failure, because edges take time.
        """
        verdicts: list[Check] = []
        check_iterator = iter(checks(self.current))
        while check := next(check_iterator, None):
            verdicts.append(check)
            if not check.passed and self._loosen():
                verdicts, check_iterator = [], iter(checks(self.current))
        return tuple(verdicts)

    def loosest(self) -> OutputLimits:
        """The loosest limits, after all are measured."""
        while self._loosen():
            pass
        return self.current

    def _loosen(self) -> bool:
        previous = self.current
        self.current = next(self.looser, previous)
        return self.current is not previous
