"""Independent rebuilds of one published engine, and how far they are from each other."""

from pathlib import Path
from tempfile import TemporaryDirectory

from builders.execution.jobs import Job
from enginery.registry.build_request import request_of
from pipeline.canary.engines import Chosen
from pipeline.compile.jobs.blobs import fetch
from pipeline.compile.run_context import Workshop
from pipeline.compile.steps.keys import engine_limits
from pipeline.operations.jobs.rebuild import RebuildEngine
from pipeline.operations.revalidate import spec_of
from pipeline.progress.events import Finished
from pipeline.spec.model import overrides
from pipeline.values import Json


def rebuild(chosen: Chosen, times: int, shop: Workshop) -> Json:
    """Build `times` times, one process after the other, on this machine: the reproducibility report.

    Raises StepError for a build that crashes, and what the backend raises for one that fails.
    """
    from validation.contracts.rebuilds import Rebuilt, reproducibility
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import budgets

    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    limits = engine_limits(spec, "build")
    golden = manifest.sources["golden"]
    with TemporaryDirectory(prefix="enginery-rebuild-") as folder:
        noise = GoldenSet.load(fetch(shop.store, golden, Path(folder) / "golden")).noise
        built = []
        for index in range(times):
            name, out = f"rebuild {index + 1} of {entry.unit}", Path(folder) / f"answers {index}"
            job = Job(name, RebuildEngine(request, golden, out), shop.store.uri, limits)
            built.append(Rebuilt(shop.shown(shop.local, name, job), GoldenSet.load(out)))
            shop.progress.emit(Finished(name, words=built[-1].engine[:12]))
        budget = budgets("engine", request.precision, noise).override(overrides(spec, request.precision, "engine"))
        report = reproducibility(built, budget)
    return {
        **chosen.identity,
        **report,
        "published": {"digest": entry.digest, "rebuilt": entry.digest in report["engines"]},
    }
