"""The limits of one graph's or engine's checks: documented, measured on the model, or a person's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginesmith.core.types import QUANTIZED, BuildRequest, Precision, Session
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from builders.reference import ReferenceSession
    from validation.comparison.sessions import Opener
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import Budgets, OutputLimits, StagedLimits
    from validation.limits.rounding import Honest

WEAK = "a weak limit: it knows nothing of the task; give golden.metric, or limits of your own"
DECIDED = (
    "quantization decides near ties otherwise; if the task allows some, give argmax_agreement in validation.limits"
)
STRICTEST = "the strictest limit that honest rounding can give: it was not measured"


def engine_drift_limits(
    graph: Path,
    reference: Session,
    request: BuildRequest,
    golden: "GoldenSet",
    limits: Mapping[str, float],
    workdir: Path,
    opens: "Opener | None" = None,
) -> "StagedLimits":
    """The limits of an engine against its graph: the strictest, then those of honest rounding measured on the graph.

    graph: as it is run (`blobs.runnable`); reference: that graph, opened, for as long as limits are asked for.
    limits: what the spec says; with any, honest rounding is measured at once.  opens: graphs with rounding
    in them, where sessions take whole sequences.
    """
    from validation.limits.budget import OutputLimits, StagedLimits, allow_near_ties, budgets, strictest
    from validation.perturbation.honest import honest_rounding

    scales = {state.output: state.scale for state in request.quantized_states}

    def measured() -> "Iterator[OutputLimits]":
        backend = discovery.configure(request.backend, dict(request.options))
        blocks = request.precision == "int4" and backend.capabilities.rounds_activations
        for honest in honest_rounding(
            graph,
            golden,
            reference,
            opens or partial(as_written, steps=golden.sequences is not None),
            workdir,
            activation_blocks=blocks,
            thorough=True,
            whole=opens is not None,
        ):
            found = budgets("engine", request.precision, golden.noise, honest)
            found = allow_near_ties(found, scales, honest.drifts).override(limits)
            yield OutputLimits(add_notes(found, reference, _unknown(honest)), honest.drifts)

    looser = measured()
    if limits:
        return StagedLimits(next(looser), looser)
    return StagedLimits(
        OutputLimits(add_notes(strictest("engine", request.precision, golden.noise), reference, STRICTEST)), looser
    )


def graph_drift_limits(
    path: Path,
    reference: Session,
    precision: Precision,
    golden: "GoldenSet",
    limits: Mapping[str, float],
    metrics: Sequence[TaskMetric],
    workdir: Path,
    opens: "Opener | None" = None,
) -> "StagedLimits":
    """The same of a graph in a lower precision against the fp32 one, which `path` and `reference` are."""
    from validation.limits.budget import OutputLimits, StagedLimits, budgets
    from validation.perturbation.honest import honest_rounding

    if precision in QUANTIZED:
        found = budgets("quantization", precision, golden.noise).override(limits)
        weak = "" if metrics or "sqnr_db" in limits else WEAK
        decided = "" if "argmax_agreement" in limits else DECIDED
        return StagedLimits(OutputLimits(add_notes(found, reference, weak, decided)))
    half: Precision | None = None if precision == "fp32" else precision

    def measured() -> "Iterator[OutputLimits]":
        opener = opens or partial(as_written, steps=golden.sequences is not None)
        honestly = honest_rounding(
            path, golden, reference, opener, workdir, half=half, thorough=True, whole=opens is not None
        )
        for honest in honestly:
            found = budgets("quantization", precision, golden.noise, honest).override(limits)
            yield OutputLimits(add_notes(found, reference, _unknown(honest)), honest.drifts)

    looser = measured()
    return StagedLimits(next(looser), looser)


def _unknown(honest: "Honest") -> str:
    return f"honest rounding is not known: {honest.reason}" if honest.reason else ""


def as_written(path: Path, steps: bool = False) -> "ReferenceSession":
    """A graph with rounding in it, opened for a few runs. steps: as in `threads_for`."""
    from builders.reference import ReferenceSession, threads_for

    return ReferenceSession(path, threads=threads_for(path, steps), plan_buffers=False)


def add_notes(found: "Budgets", reference: Session, note: str, of_integers: str | None = None) -> "Budgets":
    """The limits with a note for each output that has none. of_integers: for those of integers and booleans."""
    told = {
        (spec.name, "golden"): note if of_integers is None or "float" in spec.dtype else of_integers
        for spec in reference.outputs
    }
    return replace(found, notes={**{key: text for key, text in told.items() if text}, **found.notes})
