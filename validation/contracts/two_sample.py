"""Contracts, and the two-sample tests that they use."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.reports.proof import Check, unmeasured
from enginesmith.core.types import Dim, Session, Tensors, TensorSpec
from validation.comparison.sessions import run
from validation.contracts.predicates import find_broken
from validation.contracts.repeats import Likeness, repeat_checks
from validation.contracts.terms import Contract, Seeds, Structure
from validation.data.samples import sizes_of
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budgets
from validation.metrics.drift import is_exact

# A two-sample test of a stochastic model: are the engine's outputs drawn from the graph's distribution?
#
# The statistic is the maximum mean discrepancy (Gretton et al., "A Kernel Two-Sample Test", 2012) with a Gaussian
# kernel whose width is the median distance of the pooled sample (their section 8). Its distribution is estimated by
# random assignments of the draws to the two sides. The p-value (1 + number of assignments with a statistic as large) /
# (1 + assignments) makes the test exact: for equal distributions it is below alpha in at most alpha of the cases
# (Phipson and Smyth, "Permutation P-values Should Never Be Zero", 2010). Over several outputs Holm's correction ("A
# Simple Sequentially Rejective Multiple Test Procedure", 1979) keeps alpha for all outputs together.
#
# Each side has its own seeds: the test needs independent samples, and an engine may have another generator. SEED
# determines all random numbers drawn here.

SEED = 0
# Permutations times alpha (the p-value then resolves a tenth of alpha); and permutations in memory at a time.
PER_STEP, AT_ONCE = 10, 2048
# The most elements of an output that are compared; from a larger output this many are drawn at random, once.
MOST_ELEMENTS = 1 << 14


def two_sample_checks(seeds: Seeds, reference: Session, candidate: Session, golden: GoldenSet) -> Iterator[Check]:
    """A check of each output: the p-value after Holm's correction, which must not be below alpha.

    The inputs are those of the first case. An error of the candidate is a failed check; one of the reference raises.

    golden: its first case is the input.
    Raises InputError for a `vary` that is no input.
    """
    case = golden.cases[0]
    generator = np.random.default_rng(SEED)
    if seeds.vary is not None and seeds.vary not in case.inputs:
        raise InputError(f"seeds.vary: {seeds.vary!r} is not an input; known: {', '.join(case.inputs)}")
    references = [run(reference, inputs) for inputs in _draw_inputs(seeds, case.inputs, generator)]
    try:
        actual = [run(candidate, inputs) for inputs in _draw_inputs(seeds, case.inputs, generator)]
    except EnginesmithError as error:
        yield Check("engine", "contract runs", "", case.name, None, None, False, str(error))
        return
    p_values: dict[str, float] = {}
    for output in seeds.outputs:
        draw_pairs = [[outputs.get(output) for outputs in runs] for runs in (references, actual)]
        reason = _unfit(*draw_pairs)
        if reason:
            yield Check("engine", "contract seeds", output, case.name, None, seeds.alpha, False, reason)
            continue
        permutation_count = math.ceil(PER_STEP * len(seeds.outputs) / seeds.alpha)
        rows, other_rows = (np.stack([np.asarray(array).reshape(-1) for array in runs]) for runs in draw_pairs)
        p_values[output] = p_value(rows, other_rows, permutation_count)
    note = f"p-value of {seeds.draws} draws of each side, over {len(seeds.outputs)} outputs"
    for output, p in holm(p_values, len(seeds.outputs)).items():
        yield Check("engine", "contract seeds", output, case.name, p, seeds.alpha, p >= seeds.alpha, note)


def p_value(expected: Array, actual: Array, permutations: int) -> float:
    """The probability that two samples (draws, elements) of one distribution differ as much; exact at any size."""
    pooled_rows = np.concatenate([expected, actual])
    generator = np.random.default_rng(SEED)
    kernel = _kernel(pooled_rows, generator)
    kernel = kernel - kernel.mean(axis=0) - kernel.mean(axis=1, keepdims=True) + kernel.mean()
    kernel = kernel.astype(np.float32)  # centred, because large sums cancel; the weights of the sides sum to 0
    side_weights = np.concatenate([np.full(len(expected), 1 / len(expected)), np.full(len(actual), -1 / len(actual))])
    side_weights = side_weights.astype(np.float32)
    statistic = float(side_weights @ kernel @ side_weights)
    larger_count, remaining_count = 0, permutations
    while remaining_count:
        count = min(remaining_count, AT_ONCE)
        signs = generator.permuted(np.broadcast_to(side_weights, (count, len(side_weights))), axis=1)
        test_statistics = np.einsum("ij,ij->i", signs @ kernel, signs)
        # The tolerance covers equal assignments, which are summed in another order.
        larger_count += int((test_statistics >= statistic * (1 - 1e-5)).sum())
        remaining_count -= count
    return (1 + larger_count) / (1 + permutations)


def holm(p_values: Mapping[str, float], tests: int) -> dict[str, float]:
    """The p-values by name after Holm's step-down correction for `tests` tests, in the order of `p_values`."""
    adjusted_values, least_value = dict[str, float](), 0.0
    for index, name in enumerate(sorted(p_values, key=lambda output: p_values[output])):
        least_value = max(least_value, min(1.0, (tests - index) * p_values[name]))
        adjusted_values[name] = least_value
    return {name: adjusted_values[name] for name in p_values}


def _draw_inputs(seeds: Seeds, inputs: Tensors, generator: np.random.Generator) -> Iterator[Tensors]:
    """The inputs of each draw, with random numbers in `vary`: uniform integers, or standard normal floats."""
    for _ in range(seeds.draws):
        if seeds.vary is None:
            yield inputs
            continue
        array = inputs[seeds.vary]
        if array.dtype.kind in "iu":
            high = min(int(np.iinfo(array.dtype).max), 2**31 - 1)
            value = np.asarray(generator.integers(0, high, array.shape, dtype=np.int64)).astype(array.dtype)
        else:
            value = np.asarray(generator.standard_normal(array.shape)).astype(array.dtype)
        yield {**inputs, seeds.vary: value}


def _unfit(expected: Sequence[Array | None], actual: Sequence[Array | None]) -> str:
    """The reason why two samples of an output cannot be compared; '' if they can."""
    arrays = [array for array in (*expected, *actual) if array is not None]
    if len(arrays) < len(expected) + len(actual):
        return "there is no such output"
    if len({array.shape for array in arrays}) > 1:
        return "its shape changes from draw to draw"
    if not all(np.isfinite(array).all() for array in arrays):
        role = "the graph" if not all(np.isfinite(array).all() for array in arrays[: len(expected)]) else "the engine"
        return f"{role} gave a number that is not finite"
    draw_pairs = arrays[: len(expected)], arrays[len(expected) :]
    constant_flags = [all(np.array_equal(array, draws[0]) for array in draws) for draws in draw_pairs]
    if constant_flags[0]:
        return "the graph gives the same output in every draw; name the input that is the seed in seeds.vary"
    return "the engine gives the same output in every draw, and the graph does not" if constant_flags[1] else ""


def _kernel(samples: Array, generator: np.random.Generator) -> Array:
    """exp(-d^2 / 2 w^2) of all pairs of draws (n, n), w^2 the median d^2; for integers, d^2 counts unequal elements."""
    if samples.shape[1] > MOST_ELEMENTS:
        samples = samples[:, np.sort(generator.choice(samples.shape[1], MOST_ELEMENTS, replace=False))]
    if is_exact(samples):
        squares = np.stack([(samples != row).sum(axis=1) for row in samples]).astype(np.float64)
    else:
        rows = samples.astype(np.float64)
        rows -= rows.mean(axis=0)  # distances of large values would cancel
        square_norms = np.square(rows).sum(axis=1)
        squares = np.maximum(square_norms[:, None] + square_norms - 2 * rows @ rows.T, 0)
    distances = squares[np.triu_indices(len(squares), 1)]
    median_distance = float(np.median(distances)) or float(distances.max())
    return np.asarray(np.exp(-squares / (2 * median_distance)))


def contract_checks(
    contract: Contract,
    reference: Session,
    candidate: Session,
    golden: GoldenSet,
    shapes: tuple[tuple[TensorSpec, ...], Dim | None],
    budgets: Budgets,
) -> tuple[Check, ...]:
    """Every check of a contract. shapes: the inputs with the names of their dims, and the dim of the batch, if any.

    An error of the candidate is a failed check; one of the reference raises EnginesmithError.
    """
    rows = contract.distributional.rows if contract.distributional else {}
    watches: list[_Structured | Likeness] = [
        *(_Structured(name, structure, shapes[0]) for name, structure in contract.structured.items()),
        *(Likeness(name, limits, golden.labels) for name, limits in rows.items()),
    ]
    checks = list(_watch_runs(watches, reference, candidate, golden))
    if contract.bitwise is not None:
        try:
            checks += repeat_checks(contract.bitwise, candidate, golden, shapes[1], budgets)
        except EnginesmithError as error:
            checks.append(_does_not_run("golden", error))
    if contract.distributional and contract.distributional.seeds:
        checks += two_sample_checks(contract.distributional.seeds, reference, candidate, golden)
    return tuple(checks)


def _watch_runs(
    watches: "Sequence[_Structured | Likeness]", reference: Session, candidate: Session, golden: GoldenSet
) -> Iterator[Check]:
    """The checks of all promises, from one run of each session per case."""
    for case in golden.cases if watches else ():
        graph = run(reference, case.inputs)
        try:
            engine = run(candidate, case.inputs)
        except EnginesmithError as error:
            yield _does_not_run(case.name, error)
            return
        for watch in watches:
            watch.see(case, graph, engine)
    for watch in watches:
        yield from watch.checks()


def _does_not_run(case: str, error: EnginesmithError) -> Check:
    return Check("engine", "contract runs", "", case, None, None, False, str(error))


@dataclass
class _Structured:
    """The predicates of one output. The check of each predicate is that of the case that breaks it most."""

    output: str
    structure: Structure
    inputs: tuple[TensorSpec, ...]
    worst: dict[str, Check] = field(default_factory=dict)

    def see(self, case: Case, graph: Tensors, engine: Tensors) -> None:
        if self.output not in graph or self.output not in engine:
            note = "there is no such output"
            self.worst["output"] = Check("engine", "contract output", self.output, case.name, None, None, False, note)
            return
        sizes = sizes_of(case.inputs, self.inputs)
        broken_terms = find_broken(self.structure, graph[self.output], engine[self.output], sizes, (graph, engine))
        for name, value, limit in broken_terms:
            worst_check = self.worst.get(name)
            if worst_check is None or _badness(value) > _badness(worst_check.value):
                check = Check("engine", f"contract {name}", self.output, case.name, value, limit, value <= limit)
                self.worst[name] = check

    def checks(self) -> Iterator[Check]:
        yield from self.worst.values()
        if self.structure.boxes and not self.worst.keys() & {"boxes", "output"}:
            note = "contract boxes: no box in any case; give golden data that shows something, or a lower least_score"
            yield unmeasured("engine", self.output, "golden", note)


def _badness(value: float | None) -> float:
    return np.inf if value is None or np.isnan(value) else value
