"""Building a published engine once more, in a process of its own, and asking it the golden cases."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from builders import backends
from builders.types import BuildRequest
from pipeline.jobs.blobs import fetch, golden_set
from pipeline.registry.store import open_store
from pipeline.values import Json

# Of each kind: enough to see other kernels.
MOST_CASES = 8


def rebuild_engine(store: str, request: Json, golden: str, out: str, workdir: Path) -> Json:
    """Build, run and forget: nothing is put into the registry. Gives the engine's digest; answers are written to `out`.

    Raises what the backend raises, and InputError where its versions are not those that the engine was built with.
    """
    from validation.compare import run
    from validation.golden import GoldenSet

    place = open_store(store)
    wanted = BuildRequest.from_json(request)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    backends.check_toolchain(backend, wanted)
    frozen = golden_set(place, golden, workdir)
    engine = backend.build(wanted, fetch(place, wanted.model, workdir / "model.onnx"), workdir)
    with backend.open(engine) as session:
        cases = [case for kind in ("golden", "edge") for case in islice(frozen.of_kind(kind), MOST_CASES)]
        answers = [replace(case, inputs={}, expected=run(session, case.inputs)) for case in cases]
    GoldenSet(answers).save(Path(out))
    return {"engine": engine.digest}
