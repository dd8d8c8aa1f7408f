"""Independent rebuilds of one published engine, and how far they are from each other."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from builders.execution.jobs import Job
from enginery.core.codec import encode
from enginery.registry.build_request import request_of
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.jobs.blobs import fetch
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import engine_limits
from pipeline.operations.jobs.rebuild import RebuildEngine
from pipeline.operations.revalidate import spec_of
from pipeline.progress.events import Finished
from pipeline.spec.model import overrides

if TYPE_CHECKING:
    from validation.contracts.rebuilds import Reproducibility


@dataclass(frozen=True)
class RebuiltEngine:
    """What came of building an engine again. rebuilt: whether a build gave the published file."""

    chosen: ChosenEngine
    report: "Reproducibility"
    rebuilt: bool

    def to_json(self) -> dict[str, object]:
        """What `enginery rebuild --json` prints."""
        published = {"digest": self.chosen.entry.digest, "rebuilt": self.rebuilt}
        return {**encode(self.chosen.identity), **self.report.to_json(), "published": published}


def rebuild(chosen: ChosenEngine, times: int, context: RunContext) -> RebuiltEngine:
    """Build `times` times, one process after the other, on this machine: the reproducibility report.

    Raises StepError for a build that crashes, and what the backend raises for one that fails.
    """
    from validation.contracts.rebuilds import Rebuilt, reproducibility
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import budgets

    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    limits = engine_limits(spec, "build")
    golden = manifest.golden
    with TemporaryDirectory(prefix="enginery-rebuild-") as folder:
        noise = GoldenSet.load(fetch(context.store, golden, Path(folder) / "golden")).noise
        built = []
        for index in range(times):
            name, out = f"rebuild {index + 1} of {entry.unit}", Path(folder) / f"answers {index}"
            job = Job(name, RebuildEngine(request, golden, out), context.store.uri, limits)
            built.append(Rebuilt(context.run_job(context.local, name, job), GoldenSet.load(out)))
            context.progress.emit(Finished(name, words=built[-1].engine[:12]))
        budget = budgets("engine", request.precision, noise).override(overrides(spec, request.precision, "engine"))
        report = reproducibility(built, budget)
    return RebuiltEngine(chosen, report, entry.digest in report.engines)
