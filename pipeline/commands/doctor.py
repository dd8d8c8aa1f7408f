"""`enginery backends` and `enginery doctor`: what this machine can build and run, and what is missing."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.options import emit_json, json_option, registry_option
from pipeline.commands.tables import print_table

if TYPE_CHECKING:
    from builders.types import Backend, BuildRequest, Precision, Target

LEAST_FREE_GIB = 2.0
EXTRAS = {
    "onnx": "build engines: pip install 'enginery[build]'",
    "torch": "export from PyTorch: pip install 'enginery[export]'",
    "prefect": "run as flows: pip install 'enginery[prefect]'",
    "ray": "build on a cluster: pip install 'enginery[ray]'",
}
MARKS = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. state: 'ok', 'missing' (something optional) or 'broken' (something needed)."""

    subject: str
    state: str
    detail: str


@click.command("backends")
@json_option
def list_backends(as_json: bool) -> None:
    """List the compilers: installed or how to install, targets and precisions, and whether engines run here."""
    rows = list(_backend_rows())
    if as_json:
        emit_json({"backends": rows})
        return
    cells: list[list[str]] = []
    missing: dict[str, str] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        builds = "\n".join(f"{target}: {' '.join(kinds)}" for target, kinds in row["builds"].items())
        options = "\n".join(f"{name}={value}" for name, value in row["options"].items())
        missing |= {} if versions else {row["missing"]: "yellow"}
        cells.append([row["name"], versions or row["missing"], builds, row["runs"], options])
    print_table(("backend", "installed", "builds", "runs here", "options"), cells, styles=missing)


def _backend_rows() -> Iterator[dict[str, Any]]:
    from builders import backends

    for name in backends.names():
        backend = backends.configure(name, {})
        versions = backend.versions()
        builds = _builds(backend)
        yield {
            "name": name,
            "versions": versions,
            "missing": None if versions else _reason(backend),
            "builds": builds,
            "runs": _runs(backend),
            "options": dict(backends.options_of(backend)),
        }


def _targets() -> "tuple[Target, ...]":
    from builders.targets import parse_targets

    return parse_targets("all")


def _builds(backend: "Backend") -> dict[str, list[str]]:
    """For each target the precisions that are not refused, asked of the backend itself."""
    from builders.types import PRECISIONS

    served = [target for target in _targets() if backend.serves(target)]
    table: dict[str, list[str]] = {
        target.name: [p for p in PRECISIONS if not backend.refuses(_probe(backend, target, p))] for target in served
    }
    return {name: kinds for name, kinds in table.items() if kinds}


def _reason(backend: "Backend") -> str:
    served = next(target for target in _targets() if backend.serves(target))
    return backend.refuses(_probe(backend, served, "fp16")) or ""


def _probe(backend: "Backend", target: "Target", precision: "Precision") -> "BuildRequest":
    """A request for a model with one float input of fixed shape."""
    from builders.types import BuildRequest, TensorSpec

    tensor = (TensorSpec("x", "float32", (1, 4)),)
    return BuildRequest("0" * 64, precision, target, backend.name, tensor, tensor, ())


def _runs(backend: "Backend") -> str:
    here = [target.name for target in _targets() if backend.serves(target) and backend.runs(target) is None]
    return ", ".join(here) or "no"


@click.command()
@registry_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, registry: str, as_json: bool) -> None:
    """Say what this machine can build and run, and what is missing, with the remedy."""
    findings = [*_machine(), *_gpus(), *_compilers(), *_services(), _registry(registry)]
    if as_json:
        emit_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    ctx.exit(1 if any(finding.state == "broken" for finding in findings) else 0)


def _show(findings: list[Finding]) -> None:
    print_table(("", "", ""), [[item.state, item.subject, item.detail] for item in findings], styles=MARKS)


def _machine() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    yield Finding("machine", "ok", f"{platform.machine()}, {os.cpu_count()} CPUs, {memory:.0f} GiB memory")
    yield Finding("python", "ok", platform.python_version())
    free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    enough = free >= LEAST_FREE_GIB
    detail = f"{free:.1f} GiB free for builds" + ("" if enough else "; free some, or set TMPDIR")
    yield Finding("temporary space", "ok" if enough else "broken", detail)


def _gpus() -> Iterator[Finding]:
    from builders.cuda import gpus

    found = gpus()
    for gpu in found:
        major, minor = gpu.compute_capability
        yield Finding(f"gpu {gpu.index}", "ok", f"{gpu.name}, sm_{major}{minor}")
    if not found:
        yield Finding(
            "gpu", "missing", "none; engines for GPUs are built here and stay unproven until a GPU node validates"
        )


def _compilers() -> Iterator[Finding]:
    from builders import backends

    for name in backends.names():
        backend = backends.configure(name, {})
        versions = backend.versions()
        if versions:
            targets = ", ".join(_builds(backend))
            yield Finding(name, "ok", f"{' '.join(sorted(set(versions.values())))}; builds for {targets}")
        else:
            yield Finding(name, "missing", _reason(backend))


def _services() -> Iterator[Finding]:
    from pipeline.workshop import versions

    for name, version in versions(*EXTRAS).items():
        state = "missing" if version == "absent" else "ok"
        remedy = f"not installed; to {EXTRAS[name]}"
        yield Finding(name, state, version if state == "ok" else remedy)
    api = os.environ.get("PREFECT_API_URL")
    yield Finding("prefect api", "ok", api or "not configured: steps run in-process; --runner prefect starts a server")


def _registry(registry: str) -> Finding:
    from builders.errors import EngineryError
    from pipeline.registry.store import open_store
    from pipeline.registry.versions import models

    try:
        count = len(models(open_store(registry)))
    except EngineryError as error:
        return Finding("registry", "missing", str(error))
    return Finding("registry", "ok", f"{registry}: {count} models")
