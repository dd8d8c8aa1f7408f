"""Whether padding changes an engine's answers: the same samples as they are and padded as a router does."""

from collections.abc import Mapping
from functools import partial
from itertools import islice

import numpy as np

from enginesmith.arrays import find_profile
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import PADDING, Check, describe
from enginesmith.core.types import BuildRequest, Session
from enginesmith.serving.pad_plan import plan_padding
from enginesmith.serving.padding import Padding
from validation.comparison.sessions import limited_checks, run
from validation.data.samples import sizes_of
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import StagedLimits

# Of each kind of golden case; each is run twice.
MOST_CASES = 16


def padding_checks(
    session: Session, request: BuildRequest, padding: Padding, golden: GoldenSet, limits: StagedLimits
) -> list[Check]:
    """One check: how many cases the engine answers otherwise when they are padded, by more than its limits on drift.

    A case is padded to the next edge of every dim that has a rule, or, without edges, to the next size; where no
    profile holds that, it is left out. Failed where none can be padded: then nothing shows that the rules are right.
    """
    cases = [case for kind in ("golden", "edge") for case in islice(golden.of_kind(kind), MOST_CASES)]
    tried, wrong = 0, list[str]()
    for case in cases:
        if (padded := next_sizes(request, padding, sizes_of(case.inputs, request.inputs))) is None:
            continue
        tried += 1
        if reason := _differs(session, request, padding, case, padded, limits):
            wrong.append(reason)
    if not tried:
        note = "no golden or edge case can be padded within the profiles; add smaller samples, or remove pad"
        return [Check("engine", PADDING, "", "all", None, 0.0, False, note)]
    note = f"{wrong[0]}; {len(wrong)} of {tried} padded cases" if wrong else f"{tried} padded cases"
    return [Check("engine", PADDING, "", "all", float(len(wrong)), 0.0, not wrong, note)]


def next_sizes(request: BuildRequest, padding: Padding, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The sizes that a case of these sizes is padded to; None where no profile holds any such."""
    found = dict(sizes)
    for dim in sorted(padding.dims & sizes.keys()):
        step = request.multiples.get(dim, 1)
        larger = (edge for edge in padding.edges.get(dim, (sizes[dim] + step,)) if edge > sizes[dim])
        raised = {**found, dim: next(larger, sizes[dim])}
        if _is_held(request, raised):
            found = raised
    return found if found != sizes else None


def _is_held(request: BuildRequest, sizes: Mapping[str, int]) -> bool:
    empty = {spec.name: np.broadcast_to(np.int8(0), spec.at(sizes)) for spec in request.inputs}
    try:
        find_profile(request.profiles, empty)
    except EnginesmithError:
        return not request.profiles
    return True


def _differs(
    session: Session,
    request: BuildRequest,
    padding: Padding,
    case: Case,
    padded: Mapping[str, int],
    limits: StagedLimits,
) -> str:
    """How the answers of a case differ by more than the limits; '' where they do not."""
    plan = plan_padding(request.inputs, request.outputs, padding, sizes_of(case.inputs, request.inputs), padded)
    name = f"{case.name} padded to {', '.join(f'{dim} {size}' for dim, size in padded.items())}"
    try:
        alone = run(session, case.inputs)
        answer = plan.crop(run(session, plan.pad(case.inputs)))
        for output, expected in alone.items():
            pair = expected, answer[output]
            checks = limits.judge(partial(limited_checks, "engine", (name, case.kind), output, pair))
            if failed := next((check for check in checks if not check.passed), None):
                return describe(failed)
    except (EnginesmithError, KeyError, ValueError) as error:
        return f"{name}: {error}"
    return ""
