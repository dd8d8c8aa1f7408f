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
    from pipeline.compile import InProcess
    from pipeline.intake.once import compile_once
    from pipeline.progress import Silent

    chosen = RunOptions(**options)  # type: ignore[arg-type] # dataclass checks the names
    return compile_once(spec, chosen, InProcess(), Silent()).outcome
