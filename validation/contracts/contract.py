"""The contract of a spec, as checks of the engine joint: a broken one fails the engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from builders.errors import EngineryError
from builders.types import Dim, Session, TensorSpec
from validation.budget import Budgets
from validation.compare import run
from validation.contracts.predicates import Structure
from validation.contracts.repeats import Repeats, repeat_checks
from validation.golden import GoldenSet
from validation.report import Check
from validation.samples import sizes_of


@dataclass(frozen=True)
class Contract:
    """What is promised. bitwise: None when no bits are.  structured: by output."""

    bitwise: Repeats | None = None
    structured: Mapping[str, Structure] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Contract":
        """Read `validation.contract` of a spec. Raises InputError for an unknown predicate."""
        bitwise = data.get("bitwise")
        structured = {output: Structure.from_json(item) for output, item in data.get("structured", {}).items()}
        return cls(None if bitwise is None else Repeats(**bitwise), structured)


def contract_checks(
    contract: Contract,
    reference: Session,
    candidate: Session,
    golden: GoldenSet,
    shapes: tuple[tuple[TensorSpec, ...], Dim | None],
    budgets: Budgets,
) -> tuple[Check, ...]:
    """Every check of a contract. shapes: inputs with the names of the dims, and the dim of the batch.

    What the candidate raises is a failed check; errors of the reference raise.
    """
    checks = list(_structured(contract.structured, reference, candidate, golden, shapes[0]))
    if contract.bitwise is not None:
        try:
            checks += repeat_checks(contract.bitwise, candidate, golden, shapes[1], budgets)
        except EngineryError as error:
            checks.append(Check("engine", "contract runs", "", "golden", None, None, False, str(error)))
    return tuple(checks)


def _structured(
    structured: Mapping[str, Structure],
    reference: Session,
    candidate: Session,
    golden: GoldenSet,
    inputs: tuple[TensorSpec, ...],
) -> Iterator[Check]:
    if not structured:
        return
    worst: dict[tuple[str, str], Check] = {}
    for case in golden.cases:
        sizes = sizes_of(case.inputs, inputs)
        expected = run(reference, case.inputs)
        try:
            actual = run(candidate, case.inputs)
        except EngineryError as error:
            yield Check("engine", "contract runs", "", case.name, None, None, False, str(error))
            return
        for output, structure in structured.items():
            if output not in actual or output not in expected:
                yield Check(
                    "engine", "contract output", output, case.name, None, None, False, "there is no such output"
                )
                return
            for name, value, limit in structure.broken(expected[output], actual[output], sizes):
                check = Check("engine", f"contract {name}", output, case.name, value, limit, value <= limit)
                worst[output, name] = _worse(worst.get((output, name)), check)
    yield from worst.values()


def _worse(before: Check | None, now: Check) -> Check:
    if before is None:
        return now
    rank = [np.inf if item.value is None or np.isnan(item.value) else item.value for item in (before, now)]
    return now if rank[1] > rank[0] else before
