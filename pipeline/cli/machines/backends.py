"""`enginery backends`: which compilers there are, what each builds, and whether its engines run here.

Everything is asked of the backends themselves (`refuses`, `runs`, `versions`): nothing is said of them that they would
not do, and no compiler is imported.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from enginery.core.types import Scalar
from pipeline.cli.options import emit_json, json_option
from pipeline.cli.tables import echo, print_table

if TYPE_CHECKING:
    from enginery.core.types import Backend, BuildRequest, Precision, Target

_CLAIMS = {"bytes": "same bytes", "outputs": "same outputs", "budget": "within limits"}


@dataclass(frozen=True)
class Row:
    """What is known of one backend.

    versions: empty when it is not installed.  missing: how to get it, then.  builds: precisions by target, also of what
    is not installed.  dynamic: whether one engine takes several sizes of an input.  determinism: what two builds of one
    request share.  tunes_on_target: whether it builds only where its GPU is.  runs: targets whose engines run here.
    options: their values in force.  meanings: of the options.
    """

    name: str
    versions: dict[str, str]
    missing: str | None
    install: str
    builds: dict[str, list[str]]
    dynamic: bool
    determinism: str
    tunes_on_target: bool
    runs: list[str]
    options: dict[str, Scalar]
    meanings: dict[str, str]


@click.command("backends")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def list_backends(names: tuple[str, ...], as_json: bool) -> None:
    """List the compilers: installed or how to install, what each builds, and whether its engines run here.

    NAME: show only these, with their options.
    """
    from builders.backends import discovery

    rows = [row_of(discovery.configure(name, {})) for name in names or discovery.names()]
    if as_json:
        emit_json({"backends": [asdict(row) for row in rows]})
    elif names:
        for row in rows:
            echo("\n".join(_details(row)))
    else:
        _show(rows)


def row_of(backend: "Backend") -> Row:
    """Ask a backend for everything."""
    from builders.backends import discovery

    versions = backend.versions()
    return Row(
        name=backend.name,
        versions=versions,
        missing=None if versions else backend.install,
        install=backend.install,
        builds=builds_of(backend),
        dynamic=_takes_dynamic(backend),
        determinism=backend.capabilities.determinism,
        tunes_on_target=backend.capabilities.tunes_on_target,
        runs=[target.name for target in _list_served(backend) if versions and backend.runs(target) is None],
        options=dict(discovery.options_of(backend)),
        meanings=discovery.option_meanings(type(backend)),
    )


def builds_of(backend: "Backend") -> dict[str, list[str]]:
    """For each target the precisions that are not refused, or for nothing but that it is not installed."""
    from enginery.core.types import PRECISIONS

    table: dict[str, list[str]] = {
        target.name: [p for p in PRECISIONS if _would_build(backend, _probe(backend, target, p))]
        for target in _list_served(backend)
    }
    return {name: kinds for name, kinds in table.items() if kinds}


def group_by_precisions(builds: Mapping[str, list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Targets that take the same precisions, together: (targets, precisions)."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for target, kinds in builds.items():
        groups.setdefault(tuple(kinds), []).append(target)
    for precisions, targets in groups.items():
        yield targets, list(precisions)


def _list_served(backend: "Backend") -> "list[Target]":
    from enginery.core.hardware.targets import parse_targets

    return [target for target in parse_targets("all") if backend.serves(target)]


def _takes_dynamic(backend: "Backend") -> bool:
    """Whether a model with a dynamic batch is built for any target that it builds for."""
    return any(
        _would_build(backend, _probe(backend, target, precision, dynamic=True))
        for target in _list_served(backend)
        for precision in ("fp32", "fp16")
    )


def _would_build(backend: "Backend", request: "BuildRequest") -> bool:
    reason = backend.refuses(request)
    return reason is None or (not backend.versions() and reason.endswith(backend.install))


def _probe(backend: "Backend", target: "Target", precision: "Precision", *, dynamic: bool = False) -> "BuildRequest":
    """A request for a model with one float input."""
    from builders.backends.discovery import options_of, toolchain_of
    from enginery.core.types import BuildRequest, ShapeProfile, TensorSpec

    tensor = (TensorSpec("x", "float32", ("n" if dynamic else 1, 4)),)
    profiles = (ShapeProfile((("x", (1, 4), (2, 4), (4, 4)),)),) if dynamic else ()
    options, toolchain = options_of(backend), toolchain_of(backend, target)
    return BuildRequest("0" * 64, precision, target, backend.name, tensor, tensor, profiles, options, toolchain)


def _show(rows: list[Row]) -> None:
    columns = ("backend", "version", "builds", "shapes", "two builds", "runs here")
    print_table(columns, [list(_cells(row)) for row in rows], pipe_columns=100)
    for row in rows:
        if row.missing:
            echo(f"{row.name} is not installed: {row.missing}")


def _cells(row: Row) -> tuple[str, ...]:
    builds = "\n".join(f"{' '.join(targets)}: {' '.join(kinds)}" for targets, kinds in group_by_precisions(row.builds))
    where = "; on its GPU" if row.tunes_on_target else ""
    shapes, claim = "dynamic" if row.dynamic else "fixed", _CLAIMS[row.determinism]
    return row.name, main_version(row) or "not here", builds + where, shapes, claim, ", ".join(row.runs) or "no"


def main_version(row: Row) -> str:
    """The version of the distribution that has the backend's name, else of the first that it names; '' for none."""
    return row.versions.get(row.name) or next(iter(row.versions.values()), "")


def _details(row: Row) -> Iterator[str]:
    yield row.name
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    yield f"  installed: {versions}" if row.versions else f"  not installed: {row.install}"
    verb = "builds" if row.versions else "would build"
    for targets, kinds in group_by_precisions(row.builds):
        yield f"  {verb} for {' '.join(targets)}: {' '.join(kinds)}"
    yield f"  shapes: {'dynamic' if row.dynamic else 'fixed'}; two builds: {_CLAIMS[row.determinism]}"
    if row.tunes_on_target:
        yield "  builds only on a node with the GPU of its target, which it tunes on"
    yield f"  runs here: {', '.join(row.runs) or 'no'}"
    for name, value in row.options.items():
        yield f"  option {name}: {json.dumps(value)}"
        yield from textwrap.wrap(row.meanings.get(name, ""), 96, initial_indent="    ", subsequent_indent="    ")
