"""The limits of one graph's or engine's checks: documented, measured on the model, or a person's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginesmith.core.reports.proof import DECISIONS
from enginesmith.core.types import IN_BLOCKS, QUANTIZED, BuildRequest, Precision, Session
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from builders.reference import ReferenceSession
    from validation.comparison.sessions import Opener
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import Budgets, OutputLimits, StagedLimits
    from validation.limits.rounding import Honest

WEAK = "a weak limit: it knows nothing of the task; give golden.metric, or limits of your own"
DECIDED = f"quantization decides near ties otherwise; if the task allows some, give {DECISIONS} in validation.limits"
STRICTEST = "the strictest limit that honest rounding can give: it was not measured"


@dataclass(frozen=True)
class CompiledLimits:
    """The limits of an engine against its graph: the strictest, then those of honest rounding measured on the graph.

    graph: as it is run (`blobs.runnable`).  limits: what the spec says; with any, honest rounding is measured at once.
    """

    graph: Path
    request: BuildRequest
    limits: Mapping[str, float]
    workdir: Path

    def __call__(self, reference: Session, golden: "GoldenSet", opens: "Opener | None" = None) -> "StagedLimits":
        """Those on a golden set. reference: the graph, opened, for as long as limits are asked for.  opens: graphs with
        rounding in them, where sessions take whole sequences."""
        from validation.limits.budget import OutputLimits, StagedLimits, allow_near_ties, budgets, strictest
        from validation.perturbation.honest import honest_rounding

        scales = {state.output: state.scale for state in self.request.quantized_states}

        def measured() -> "Iterator[OutputLimits]":
            backend = discovery.configure(self.request.backend, dict(self.request.options))
            blocks = self.request.precision in IN_BLOCKS and backend.capabilities.rounds_activations
            for honest in honest_rounding(
                self.graph,
                golden,
                reference,
                opens or partial(as_written, steps=golden.sequences is not None),
                self.workdir,
                activation_blocks=blocks,
                thorough=True,
                whole=opens is not None,
            ):
                found = budgets("engine", self.request.precision, golden.noise, honest)
                found = allow_near_ties(found, scales, honest.drifts).override(self.limits)
                yield OutputLimits(add_notes(found, reference, _unknown(honest)), honest.drifts)

        looser = measured()
        if self.limits:
            return StagedLimits(next(looser), looser)
        first = strictest("engine", self.request.precision, golden.noise)
        return StagedLimits(OutputLimits(add_notes(first, reference, STRICTEST)), looser)


@dataclass(frozen=True)
class WrittenLimits:
    """The limits of a graph in a lower precision against the fp32 one, which lies at `path`.

    limits, metrics: what the spec says.
    """

    path: Path
    precision: Precision
    limits: Mapping[str, float]
    metrics: Sequence[TaskMetric]
    workdir: Path

    def __call__(self, reference: Session, golden: "GoldenSet", opens: "Opener | None" = None) -> "StagedLimits":
        """Those on a golden set. reference, opens: as of `CompiledLimits`, of the fp32 graph."""
        from validation.limits.budget import OutputLimits, StagedLimits, budgets
        from validation.perturbation.honest import honest_rounding

        if self.precision in QUANTIZED:
            found = budgets("quantization", self.precision, golden.noise).override(self.limits)
            weak = "" if self.metrics or "sqnr_db" in self.limits else WEAK
            decided = "" if DECISIONS in self.limits else DECIDED
            return StagedLimits(OutputLimits(add_notes(found, reference, weak, decided)))
        half: Precision | None = None if self.precision == "fp32" else self.precision

        def measured() -> "Iterator[OutputLimits]":
            opener = opens or partial(as_written, steps=golden.sequences is not None)
            honestly = honest_rounding(
                self.path, golden, reference, opener, self.workdir, half=half, thorough=True, whole=opens is not None
            )
            for honest in honestly:
                found = budgets("quantization", self.precision, golden.noise, honest).override(self.limits)
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
