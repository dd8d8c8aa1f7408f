"""What `import enginery` hands on: the verbs of the command line as functions."""

from pathlib import Path

from pipeline.publication import Outcome
from pipeline.run import RunOptions


def build(spec: Path | str, **options: object) -> Outcome:
    """Export, quantize, build, prove and publish the engines of a spec, in this process.

    spec: as `enginery build` takes it.
    options: the fields of `pipeline.run.RunOptions`: registry, targets, precisions, backends, executor, jobs.
    Raises the errors of `builders.errors`; a unit that failed is in the outcome, not an error.
    """
    from pipeline.compile import InProcess, compile_model
    from pipeline.progress import Silent
    from pipeline.run import opened

    with opened(spec, RunOptions(**options), Silent()) as run:  # type: ignore[arg-type] # dataclass checks the names
        return compile_model(run.spec, run.selection, run.shop, InProcess())
