"""Which sizes an engine answers, beyond those that it was proven at."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Dim, Session, Tensors
from enginesmith.registry.store.base import open_store
from pipeline.compile.steps.blobs import fetch_graph, golden_set, open_session, runnable
from pipeline.values import EngineBlob, ModelShapes

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class AnsweredShapes:
    """Which sizes an engine answers. within: between the ends of the buckets.  outside: beyond the dims.

    Each is None where there is no such size, or the graph itself does not answer there.
    """

    within: bool | None
    outside: bool | None


@dataclass(frozen=True)
class ProbeShapes:
    """Run an engine at sizes that it was not proven at. golden: digest of the set that the inputs are from."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes

    def run(self, context: WorkerContext) -> AnsweredShapes:
        """Which sizes it answers; a wrong answer counts as none."""
        from builders.reference import ReferenceSession
        from validation.data.samples import resize

        place, wanted, workdir = open_store(context.store), self.engine.request, context.workdir
        real = golden_set(place, self.golden, workdir).real_inputs
        graph = runnable(fetch_graph(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
        with ReferenceSession(graph) as expected, open_session(place, self.engine, workdir) as actual:

            def answers(tried: Sequence[Sizes]) -> bool | None:
                inputs = (resize(real, self.shapes.inputs, sizes) for sizes in tried)
                found = {_is_right(expected, actual, wanted, each) for each in inputs} - {None}
                return all(found) if found else None

            return AnsweredShapes(answers(sizes_within(self.shapes.dims)), answers(sizes_outside(self.shapes.dims)))


def sizes_within(dims: Sequence[Dim]) -> list[dict[str, int]]:
    """For each dim a size that no bucket ends at and none is tuned for, the other dims at what they are tuned for."""
    found = []
    for dim in dims:
        between = [size for size in dim.sizes[:4096] if size not in dim.test_sizes()]
        if between:
            found.append({**{each.name: each.opt for each in dims}, dim.name: between[len(between) // 2]})
    return found


def sizes_outside(dims: Sequence[Dim]) -> list[dict[str, int]]:
    """For each dim the next size after its largest, the other dims at what they are tuned for."""
    return [{**{each.name: each.opt for each in dims}, dim.name: dim.max + dim.multiple} for dim in dims]


def _is_right(expected: Session, actual: Session, request: BuildRequest, inputs: Tensors) -> bool | None:
    """Whether the engine's outputs are within the documented limits; None where the graph itself does not answer."""
    from validation.comparison.sessions import case_checks, run
    from validation.limits.budget import default_budget

    try:
        wanted = run(expected, inputs)
    except EnginesmithError:
        return None
    budget = default_budget("engine", request.precision)
    try:
        answer = run(actual, inputs)
        checks = itertools.chain.from_iterable(
            case_checks("engine", "", name, wanted[name], answer[name], budget) for name in wanted
        )
        return all(check.passed for check in checks)
    except (EnginesmithError, KeyError, ValueError):
        return False
