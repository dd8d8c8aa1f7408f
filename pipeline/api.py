"""The functions of `import enginesmith`: the commands of the command line.

>>> import enginesmith
>>> spec = enginesmith.load_spec("project/tiny.yaml")
>>> spec.model, spec.precisions
('tiny', ('fp32', 'int8'))
>>> outcome = enginesmith.build("project/tiny.yaml", registry="registry")
>>> outcome.version, len(outcome.engines)
('1', 6)
"""

import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from enginesmith.core.errors import InputError
from pipeline.orchestration.run import RunOptions
from pipeline.outcome import Outcome

Executor = Literal["local", "ray"]


def build(
    spec: Path | str,
    *,
    registry: Path | str | None = None,
    targets: Sequence[str] | str | None = None,
    precisions: Sequence[str] | str | None = None,
    backends: Sequence[str] | str | None = None,
    executor: Executor = "local",
    jobs: int | None = None,
    ray_address: str | None = None,
    wait_for_nodes_s: float = 0.0,
) -> Outcome:
    """The outcome of exporting, quantizing, building, proving and publishing the engines of a spec, in this process.

    spec: a file (of a model or of an ensemble), 'registered:MODEL[@DIGEST]', or a file in a bucket ('s3://bucket/specs/model.yaml').
    registry: a path, file://, s3://, gs:// or az:// URI; None: as `--registry` (the variable
        ENGINESMITH_REGISTRY, the spec's publication.registry, ./registry).
    targets, precisions, backends: which of the spec's to build: ['cpu', 'l4'], or one text, 'cpu,l4'; None: all.
    executor: where units are built: 'local', in processes of this machine, or 'ray'.
    jobs: processes that run at the same time; None: one per CPU.
    ray_address: the Ray cluster for executor 'ray'; None: one that is started for this run.
    wait_for_nodes_s: seconds that a unit waits for a suitable Ray node.
    Raises InputError for an argument of another kind, and the other errors of `core.errors`; a unit that failed is
    in the outcome, not an error.
    """
    from pipeline.compile.composition import InProcess
    from pipeline.orchestration.catalog import compile_any
    from pipeline.progress import Progress

    if executor not in get_args(Executor):
        raise InputError(f"executor {executor!r}: give 'local' or 'ray'")
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs {jobs}: give 1 or more, or None for one per CPU")
    options = RunOptions(
        None if registry is None else _text("registry", registry),
        _join("targets", targets),
        _join("precisions", precisions),
        _join("backends", backends),
        executor,
        jobs,
        ray_address,
        wait_for_nodes_s,
    )
    return compile_any(_text("spec", spec), options, InProcess(), Progress()).outcome


def _text(what: str, place: Path | str) -> str:
    if not isinstance(place, str | os.PathLike):
        raise InputError(f"{what} {reprlib.repr(place)}: give a path or a URI")
    return os.fspath(place)


def _join(what: str, selection: Sequence[str] | str | None) -> str | None:
    """Names separated by commas; None for all. Raises InputError for an invalid name."""
    if selection is None or isinstance(selection, str):
        return selection
    names = list(selection) if isinstance(selection, Sequence) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{what} {selection!r}: give names, such as ['cpu'] or 'cpu,l4', or leave it out for the whole spec"
        )
    return ",".join(names)
