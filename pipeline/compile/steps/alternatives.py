"""The step that chooses between two forms of an int8 graph, both right, by the time that their engines take here.

On a CPU whose integer kernels saturate, weights of all 8 bits are multiplied in a slower way and weights within -64..64
are not (docs/concepts/cpu-kinds.md). The second form is taken where its graph keeps the limits too and its engine is
surely faster.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builders.backends import discovery
from builders.execution.jobs import Job, Needs, WorkerContext
from enginery.core.codec import encode
from enginery.core.errors import EngineryError
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.text import format_plain
from enginery.core.types import Backend, BuildRequest, Target
from enginery.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.blobs import fetch_graph, golden_set
from pipeline.compile.steps.keys import code_key, model_shapes, step_limits
from pipeline.progress.events import Finished
from pipeline.values import Exported, Graph, GraphVariant, ModelShapes

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec


@dataclass(frozen=True)
class Alternative:
    """A variant that may be built in place of another one, `usual`, for the units of a backend and a target here."""

    variant: GraphVariant
    usual: GraphVariant
    backend: Backend
    target: Target


@dataclass(frozen=True)
class AlternativeTimes:
    """Milliseconds of both at the sizes that the model is tuned for. faster: whether the alternative surely is."""

    alternative_ms: float
    usual_ms: float
    faster: bool


@dataclass(frozen=True)
class TimeAlternative:
    """Time the engines of two graphs in turns. request: of the alternative.  usual: digest of the other graph.

    golden: digest of the set that the inputs are from.
    """

    request: BuildRequest
    usual: str
    golden: str
    shapes: ModelShapes

    def run(self, context: WorkerContext) -> AlternativeTimes:
        """The times, and which is faster. Raises what building and running raise."""
        from builders.onnx_graphs.weights import load_graph
        from pipeline.quantization.search.latency import EngineTiming, benchmark_until_decided
        from validation.latency.measurement.buckets import make_buckets, tuned_for

        place, workdir, request = open_store(context.store), context.workdir, self.request
        real = golden_set(place, self.golden, workdir).real_inputs
        (bucket,) = make_buckets([tuned_for(self.shapes.dims)], self.shapes.inputs, real)
        models = [
            load_graph(fetch_graph(place, digest, workdir / f"{digest}.onnx")) for digest in (request.model, self.usual)
        ]
        backend = discovery.configure(request.backend, dict(request.options))
        with EngineTiming(backend, request, bucket.inputs, workdir) as rounds:
            found = benchmark_until_decided(rounds(*models))
        return AlternativeTimes(found.int8_ms, found.float_ms, found.won)


def choose_alternatives(
    graphs: Sequence[Graph],
    alternatives: Sequence[Alternative],
    spec: "ModelSpec",
    exported: Exported,
    context: RunContext,
) -> tuple[Graph, ...]:
    """The graphs, without those of alternatives that are not taken; those that are say in whose place they are.

    graphs: of the alternatives among them, written and checked. What was measured is a note of the graph that is taken.
    """
    by_variant = {graph.variant: graph for graph in graphs}
    for item in alternatives:
        usual, other = by_variant[item.usual], by_variant.pop(item.variant)
        if other.idle or other.proof.failed or other.model == usual.model:
            continue
        times = None if usual.proof.failed else _time(item, other, usual, spec, exported, context)
        if usual.proof.failed or (times and times.faster):
            noted = _note(item, times)
            by_variant[item.variant] = replace(other, in_place_of=item.usual, notes=(noted, *other.notes))
        elif times:
            by_variant[item.usual] = replace(usual, notes=(_note(item, times), *usual.notes))
    return tuple(by_variant.values())


def _note(item: Alternative, times: AlternativeTimes | None) -> str:
    """What was taken, and why; times: None where the usual form missed its limits."""
    if times is None:
        return f"{item.variant.name}: {item.usual.name} missed its limits"
    ms = {item.variant.name: times.alternative_ms, item.usual.name: times.usual_ms}
    measured = ", ".join(f"{name} {format_plain(value)} ms" for name, value in ms.items())
    taken = (
        f"{item.variant.name}, which is faster" if times.faster else f"{item.usual.name}, since the other is no faster"
    )
    return f"{taken}: side by side on {this_kind().name}, {measured}"


def _time(
    item: Alternative, other: Graph, usual: Graph, spec: "ModelSpec", exported: Exported, context: RunContext
) -> AlternativeTimes | None:
    """The times, from the record or measured now; None where an engine could not be built or run, which its own build
    and proof will say."""
    name = f"time {item.variant.name}"
    options, toolchain = discovery.options_of(item.backend), discovery.toolchain_of(item.backend, item.target)
    where = item.variant.precision, item.target, item.backend.name
    request = BuildRequest(other.model, *where, other.inputs, other.outputs, (), options, toolchain)
    measure = TimeAlternative(request, usual.model, exported.golden, model_shapes(spec))
    machine = {"cpu": this_kind().name, "cores": os.cpu_count() or 1}
    # Without the golden set: other values in the inputs are no reason to build another engine.
    asked = {field: value for field, value in encode(measure).items() if field != "golden"}
    key = {**asked, **machine, **code_key(TimeAlternative, backend_root(item.backend.name))}
    job = Job("time", measure, context.store.uri, step_limits(spec, "quantization"), Needs(alone=True))
    try:
        return context.once("alternative", name, key, job)
    except EngineryError as error:
        if stops_run(error):
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return None
