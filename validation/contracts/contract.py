"""The contract of a spec as checks of the engine stage: what it promises of bits, structure and distributions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.core.codec import decode
from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError
from enginesmith.core.reports.proof import Check, unmeasured
from enginesmith.core.types import Dim, Session, Tensors, TensorSpec
from validation.comparison.sessions import run
from validation.comparison.terms import DistributionalLimits
from validation.contracts.likeness import Likeness
from validation.contracts.predicates import StructureLimits
from validation.contracts.repeats import BitwiseRepeats, repeat_checks
from validation.contracts.two_sample import two_sample_checks
from validation.data.samples import sizes_of
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budgets


@dataclass(frozen=True)
class EngineContract:
    """What a spec promises. bitwise: None where equal bits are not.  structured: by output.  distributional: of rows
    and of samples."""

    bitwise: BitwiseRepeats | None = None
    structured: Mapping[str, StructureLimits] = field(default_factory=dict)
    distributional: DistributionalLimits = field(default_factory=DistributionalLimits)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "EngineContract":
        """The contract of a spec's `validation.contract`. Raises InputError for an unknown predicate."""
        try:
            return decode(dict(data), cls)
        except IntegrityError as error:
            raise InputError(f"validation.contract: {error}") from error


def contract_checks(
    contract: EngineContract,
    reference: Session,
    candidate: Session,
    golden: GoldenSet,
    shapes: tuple[tuple[TensorSpec, ...], Dim | None],
    budgets: Budgets,
) -> tuple[Check, ...]:
    """Every check of a contract. shapes: the inputs with the names of their dims, and the dim of the batch, if any.

    An error of the candidate is a failed check; one of the reference raises EnginesmithError.
    """
    watches: list[_Structured | Likeness] = [
        *(_Structured(name, item, shapes[0]) for name, item in contract.structured.items()),
        *(Likeness(name, limits, golden.labels) for name, limits in contract.distributional.rows.items()),
    ]
    checks = list(_watch_runs(watches, reference, candidate, golden))
    if contract.bitwise is not None:
        try:
            checks += repeat_checks(contract.bitwise, candidate, golden, shapes[1], budgets)
        except EnginesmithError as error:
            checks.append(_does_not_run("golden", error))
    if contract.distributional.seeds is not None:
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
    """The predicates of one output, each checked on the case that breaks it most."""

    output: str
    structure: StructureLimits
    inputs: tuple[TensorSpec, ...]
    worst: dict[str, Check] = field(default_factory=dict)

    def see(self, case: Case, graph: Tensors, engine: Tensors) -> None:
        if self.output not in graph or self.output not in engine:
            note = "there is no such output"
            self.worst["output"] = Check("engine", "contract output", self.output, case.name, None, None, False, note)
            return
        sizes = sizes_of(case.inputs, self.inputs)
        broken = self.structure.broken(graph[self.output], engine[self.output], sizes, (graph, engine))
        for name, value, limit in broken:
            before = self.worst.get(name)
            if before is None or _badness(value) > _badness(before.value):
                check = Check("engine", f"contract {name}", self.output, case.name, value, limit, value <= limit)
                self.worst[name] = check

    def checks(self) -> Iterator[Check]:
        yield from self.worst.values()
        if self.structure.boxes and not self.worst.keys() & {"boxes", "output"}:
            note = "contract boxes: no box in any case; give golden data that shows something, or a lower least_score"
            yield unmeasured("engine", self.output, "golden", note)


def _badness(value: float | None) -> float:
    return np.inf if value is None or np.isnan(value) else value
