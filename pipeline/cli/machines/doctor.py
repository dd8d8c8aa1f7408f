"""`enginesmith doctor` and `enginesmith backends list`: what this machine and its compilers can build and run, and what
is missing.

Compilers are asked by way of their backends (`refuses`, `runs`, `versions`); none is imported.
"""

import json
import os
import platform
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import command, emit, emit_json
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.text import format_bytes, pluralize
from enginesmith.core.types import PRECISIONS, BuildRequest, Scalar, ShapeProfile, TensorSpec
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import models

if TYPE_CHECKING:
    from enginesmith.core.types import Backend, Precision, Target

# Below this the temporary folder has too little room for builds.
LEAST_FREE_BYTES = 2 << 30
EXTRAS = {
    "onnx": "build engines: pip install '.[build]' in a clone",
    "torch": "export from PyTorch: pip install '.[export]' in a clone",
    "prefect": "run as flows: pip install '.[prefect]' in a clone",
    "ray": "build on a cluster: pip install '.[ray]' in a clone",
}
MARKS = {"ok": "green", "missing": "yellow", "broken": "red"}
_CLAIMS = {"bytes": "same bytes", "outputs": "same outputs", "budget": "within limits"}


@dataclass(frozen=True)
class DoctorFinding:
    """One checked thing. state: 'ok', 'missing' (it is optional) or 'broken' (it is needed)."""

    subject: str
    state: str
    detail: str


@command()
@click.pass_context
def doctor(ctx: click.Context, registry: str, as_json: bool) -> None:
    """Show which engines this machine can build and run, and how to install missing packages.

    Exit code 1 if a line says 'broken'.
    """
    findings = [*_machine(), *_gpus(), *_compilers(), *_services(), _registry(registry)]
    rows = [[finding.state, finding.subject, finding.detail] for finding in findings]
    emit(
        as_json, {"findings": [asdict(finding) for finding in findings]}, print_table, ("", "", ""), rows, styles=MARKS
    )
    ctx.exit(1 if any(finding.state == "broken" for finding in findings) else 0)


def _machine() -> Iterator[DoctorFinding]:
    import psutil

    memory = format_bytes(psutil.virtual_memory().total)
    yield DoctorFinding(
        "machine", "ok", f"{platform.machine()}, {pluralize(os.cpu_count() or 1, 'CPU')}, {memory} memory"
    )
    kind, proof_text = this_kind(), "a proof made here holds for it"
    kind_text = f"{kind.name}; the target `cpu` means this kind, and {proof_text}"
    if kind.saturates:
        kind_text = (
            f"{kind.name}, without VNNI: onnxruntime's int8 weights are kept within -64..64 for it, or its sums would "
            f"saturate (backends.onnxruntime.reduced_range); {proof_text}"
        )
    yield DoctorFinding("cpu", "ok", kind_text)
    yield DoctorFinding("python", "ok", platform.python_version())
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    is_enough = free_bytes >= LEAST_FREE_BYTES
    detail = f"{format_bytes(free_bytes)} free for builds" + ("" if is_enough else "; free some, or set TMPDIR")
    yield DoctorFinding("temporary space", "ok" if is_enough else "broken", detail)


def _gpus() -> Iterator[DoctorFinding]:
    from enginesmith.core.hardware.cuda import gpus

    devices = gpus()
    for gpu in devices:
        major, minor = gpu.compute_capability
        yield DoctorFinding(f"gpu {gpu.index}", "ok", f"{gpu.name}, sm_{major}{minor}")
    if not devices:
        yield DoctorFinding(
            "gpu",
            "missing",
            "none; engines for GPUs that are built here stay unproven until `enginesmith validate` runs on a GPU node",
        )


def _compilers() -> Iterator[DoctorFinding]:
    from builders.backends import discovery

    for name in discovery.names():
        backend = discovery.configure(name, {})
        versions = backend.versions()
        if versions:
            target_text = ", ".join(builds_of(backend))
            yield DoctorFinding(name, "ok", f"{' '.join(sorted(set(versions.values())))}; builds for {target_text}")
        else:
            yield DoctorFinding(name, "missing", f"not installed; {backend.install}")


def _services() -> Iterator[DoctorFinding]:
    from pipeline.compile.run_context import versions

    for name, version in versions(*EXTRAS).items():
        state = "missing" if version == "absent" else "ok"
        remedy = f"not installed; to {EXTRAS[name]}"
        yield DoctorFinding(name, state, version if state == "ok" else remedy)
    api_url = os.environ.get("PREFECT_API_URL")
    yield DoctorFinding(
        "prefect api", "ok", api_url or "not configured: steps run in-process; --runner prefect starts a server"
    )


def _registry(registry: str) -> DoctorFinding:
    try:
        count = len(models(open_store(registry)))
    except EnginesmithError as error:
        return DoctorFinding("registry", "missing", str(error))
    return DoctorFinding("registry", "ok", f"{registry}: {pluralize(count, 'model')}")


@dataclass(frozen=True)
class BackendRow:
    """Facts about one backend.

    versions: empty when it is not installed.  missing: how to install it then, else None.  builds: precisions by
    target, as if it was installed.  dynamic: whether one engine takes several sizes of an input.  determinism: what two
    builds of one request share.  tunes_on_target: whether it builds only where its GPU is.  runs: targets whose engines
    run here.  options: their values in force.  meanings: of the options.
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


@command("backends")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def list_backends(names: tuple[str, ...], as_json: bool) -> None:
    """List the compilers: how to install each, what it builds, and whether its engines run on this machine.

    NAME: show only this compiler, and its options.
    """
    from builders.backends import discovery

    rows = [row_of(discovery.configure(name, {})) for name in names or discovery.names()]
    if as_json:
        emit_json({"backends": [asdict(row) for row in rows]})
    elif names:
        for row in rows:
            echo("\n".join(_details(row)))
    else:
        columns = ("backend", "version", "builds", "shapes", "rebuild", "runs here")
        print_table(columns, [list(_cells(row)) for row in rows], pipe_columns=100)
        for row in rows:
            if row.missing:
                echo(f"{row.name} is not installed: {row.missing}")


def row_of(backend: "Backend") -> BackendRow:
    """A backend's properties on this machine."""
    from builders.backends import discovery

    versions = backend.versions()
    kinds: tuple[Precision, ...] = ("fp32", "fp16")
    targets = _list_served(backend)
    return BackendRow(
        name=backend.name,
        versions=versions,
        missing=None if versions else backend.install,
        install=backend.install,
        builds=builds_of(backend),
        dynamic=any(_would_build(backend, target, kind, dynamic=True) for target in targets for kind in kinds),
        determinism=backend.capabilities.determinism,
        tunes_on_target=backend.capabilities.tunes_on_target,
        runs=[target.name for target in _list_served(backend) if versions and backend.runs(target) is None],
        options=dict(discovery.options_of(backend)),
        meanings=discovery.option_meanings(type(backend)),
    )


def builds_of(backend: "Backend") -> dict[str, list[str]]:
    """By target, the precisions that a backend builds, or would if it was installed."""
    precisions_by_target: dict[str, list[str]] = {
        target.name: [precision for precision in PRECISIONS if _would_build(backend, target, precision)]
        for target in _list_served(backend)
    }
    return {name: precisions for name, precisions in precisions_by_target.items() if precisions}


def group_by_precisions(builds: Mapping[str, list[str]]) -> Iterator[tuple[list[str], list[str]]]:
    """(targets, precisions) for each group of targets with the same precisions."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for target, kinds in builds.items():
        groups.setdefault(tuple(kinds), []).append(target)
    for precisions, targets in groups.items():
        yield targets, list(precisions)


def _list_served(backend: "Backend") -> "list[Target]":
    return [target for target in parse_targets("all") if backend.serves(target)]


def _would_build(backend: "Backend", target: "Target", precision: "Precision", *, dynamic: bool = False) -> bool:
    """Whether a model with one float input is refused for no other reason than that the backend is not installed."""
    from builders.backends.discovery import options_of, toolchain_of

    tensor = (TensorSpec("x", "float32", ("n" if dynamic else 1, 4)),)
    profiles = (ShapeProfile((("x", (1, 4), (2, 4), (4, 4)),)),) if dynamic else ()
    options, toolchain = options_of(backend), toolchain_of(backend, target)
    request = BuildRequest("0" * 64, precision, target, backend.name, tensor, tensor, profiles, options, toolchain)
    reason = backend.refuses(request)
    return reason is None or (not backend.versions() and reason.endswith(backend.install))


def _cells(row: BackendRow) -> tuple[str, ...]:
    builds = "\n".join(
        f"{' '.join(targets)}: {' '.join(precisions)}" for targets, precisions in group_by_precisions(row.builds)
    )
    tuning_note = "\n(only on the target)" if row.tunes_on_target else ""
    shapes, claim = "dynamic" if row.dynamic else "fixed", _CLAIMS[row.determinism]
    # Of the distribution that has the backend's name, else of the first that it names.
    version = row.versions.get(row.name) or next(iter(row.versions.values()), "not installed")
    return row.name, version, builds + tuning_note, shapes, claim, ", ".join(row.runs) or "no"


def _details(row: BackendRow) -> Iterator[str]:
    """The lines of `enginesmith backends list NAME`."""
    yield row.name
    version_text = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    yield f"  installed: {version_text}" if row.versions else f"  not installed: {row.install}"
    verb = "builds" if row.versions else "would build"
    for targets, precisions in group_by_precisions(row.builds):
        yield f"  {verb} for {' '.join(targets)}: {' '.join(precisions)}"
    yield f"  shapes: {'dynamic' if row.dynamic else 'fixed'}; a rebuild gives: {_CLAIMS[row.determinism]}"
    if row.tunes_on_target:
        yield "  builds only on a node with the GPU of the target, because it tunes on this GPU"
    yield f"  runs here: {', '.join(row.runs) or 'no'}"
    for name, value in row.options.items():
        yield f"  option {name}: {json.dumps(value)}"
        yield from textwrap.wrap(row.meanings.get(name, ""), 96, initial_indent="    ", subsequent_indent="    ")
