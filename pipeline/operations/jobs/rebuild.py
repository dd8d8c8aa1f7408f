"""Building a published engine once more, in a process of its own, and asking it the golden cases."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from enginery.core.types import BuildRequest
from enginery.registry.store.base import open_store
from pipeline.compile.jobs.blobs import fetch, golden_set

# Of each kind: enough to see other kernels.
MOST_CASES = 8


@dataclass(frozen=True)
class RebuildEngine:
    """Build an engine once more and run it on golden cases; nothing is put into the registry.

    golden: digest of the golden set.  answers: the file that the answers are written to.
    """

    request: BuildRequest
    golden: str
    answers: Path

    def run(self, context: WorkerContext) -> str:
        """The digest of the engine.

        Raises what the backend raises, and InputError where its versions are not those that the engine was built with.
        """
        from validation.comparison.sessions import run
        from validation.golden.golden_set import GoldenSet

        place, workdir = open_store(context.store), context.workdir
        backend = discovery.configure(self.request.backend, dict(self.request.options))
        discovery.check_toolchain(backend, self.request)
        frozen = golden_set(place, self.golden, workdir)
        engine = backend.build(self.request, fetch(place, self.request.model, workdir / "model.onnx"), workdir)
        with backend.open(engine) as session:
            cases = [case for kind in ("golden", "edge") for case in islice(frozen.of_kind(kind), MOST_CASES)]
            answers = [replace(case, inputs={}, expected=run(session, case.inputs)) for case in cases]
        GoldenSet(answers).save(self.answers)
        return engine.digest
