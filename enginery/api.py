"""What `import enginery` hands on: the verbs of the command line as functions."""

from pathlib import Path

from pipeline.publication import Outcome
from pipeline.registry.pull import Pulled
from pipeline.run import RunOptions


def build(spec: Path | str, **options: object) -> Outcome:
    """Export, quantize, build, prove and publish the engines of a spec, in this process.

    options: the fields of `pipeline.run.RunOptions`: registry, targets, precisions, backends, executor, jobs.
    Raises the errors of `builders.errors`; a unit that failed is in the outcome, not an error.
    """
    from pipeline.compile import InProcess, compile_model
    from pipeline.progress import Silent
    from pipeline.run import opened

    with opened(spec, RunOptions(**options), Silent()) as run:  # type: ignore[arg-type] # dataclass checks the names
        return compile_model(run.spec, run.selection, run.shop, InProcess())


def pull(
    reference: str,
    *,
    registry: Path | str,
    dest: Path | str,
    target: str = "auto",
    precision: str | None = None,
    proven_only: bool = False,
) -> Pulled:
    """Copy the engine that fits `target` best into the folder `dest`, verified, and describe it in JSON beside it.

    reference: 'name', 'name@VERSION' or 'name:CHANNEL'.  target: 'auto' is this machine.
    Raises UnknownNameError when nothing fits (each rejection with its reason), IntegrityError, UnavailableError.
    """
    from pipeline.registry.machine import target_named
    from pipeline.registry.names import parse_reference
    from pipeline.registry.pull import pull as pull_engine
    from pipeline.registry.store import open_store

    store = open_store(registry)
    return pull_engine(
        store, parse_reference(reference), target_named(target), Path(dest), precision, proven_only=proven_only
    )
