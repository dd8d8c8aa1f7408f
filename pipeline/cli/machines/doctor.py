"""`enginery doctor`: what this machine can build and run, and what is missing."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click

from enginery.core.hardware.targets import EXACT_SESSION, CpuKind, this_kind
from enginery.core.text import format_bytes, pluralize
from pipeline.cli.machines.backends import builds_of
from pipeline.cli.options import emit_json, json_option, registry_option
from pipeline.cli.tables import print_table

LEAST_FREE_BYTES = 2 << 30
EXTRAS = {
    "onnx": "build engines: pip install 'enginery[build]'",
    "torch": "export from PyTorch: pip install 'enginery[export]'",
    "prefect": "run as flows: pip install 'enginery[prefect]'",
    "ray": "build on a cluster: pip install 'enginery[ray]'",
}
MARKS = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True)
class DoctorFinding:
    """One thing looked at. state: 'ok', 'missing' (something optional) or 'broken' (something needed)."""

    subject: str
    state: str
    detail: str


@click.command()
@registry_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, registry: str, as_json: bool) -> None:
    """Show what this machine can build and run, and what is missing, with the remedy.

    Exit code 1 if anything is broken.
    """
    findings = [*_machine(), *_gpus(), *_compilers(), *_services(), _registry(registry)]
    if as_json:
        emit_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    ctx.exit(1 if any(finding.state == "broken" for finding in findings) else 0)


def _show(findings: list[DoctorFinding]) -> None:
    print_table(("", "", ""), [[item.state, item.subject, item.detail] for item in findings], styles=MARKS)


def _machine() -> Iterator[DoctorFinding]:
    import psutil

    memory = format_bytes(psutil.virtual_memory().total)
    yield DoctorFinding(
        "machine", "ok", f"{platform.machine()}, {pluralize(os.cpu_count() or 1, 'CPU')}, {memory} memory"
    )
    yield DoctorFinding("cpu", "ok", _kind_words(this_kind()))
    yield DoctorFinding("python", "ok", platform.python_version())
    free = shutil.disk_usage(tempfile.gettempdir()).free
    enough = free >= LEAST_FREE_BYTES
    detail = f"{format_bytes(free)} free for builds" + ("" if enough else "; free some, or set TMPDIR")
    yield DoctorFinding("temporary space", "ok" if enough else "broken", detail)


def _kind_words(kind: CpuKind) -> str:
    if not kind.saturates:
        return f"{kind.name}; the target `cpu` means this kind, and a proof made here holds for it"
    return (
        f"{kind.name}, without VNNI: int8 engines are opened with {' = '.join(EXACT_SESSION)}, or onnxruntime's sums "
        "saturate, and run slower for it; those built with backends.onnxruntime.reduced_range need no such thing. "
        "A proof made here holds for this kind"
    )


def _gpus() -> Iterator[DoctorFinding]:
    from enginery.core.hardware.cuda import gpus

    found = gpus()
    for gpu in found:
        major, minor = gpu.compute_capability
        yield DoctorFinding(f"gpu {gpu.index}", "ok", f"{gpu.name}, sm_{major}{minor}")
    if not found:
        yield DoctorFinding(
            "gpu", "missing", "none; engines for GPUs are built here and stay unproven until a GPU node validates"
        )


def _compilers() -> Iterator[DoctorFinding]:
    from builders.backends import discovery

    for name in discovery.names():
        backend = discovery.configure(name, {})
        versions = backend.versions()
        if versions:
            targets = ", ".join(builds_of(backend))
            yield DoctorFinding(name, "ok", f"{' '.join(sorted(set(versions.values())))}; builds for {targets}")
        else:
            yield DoctorFinding(name, "missing", f"not installed; {backend.install}")


def _services() -> Iterator[DoctorFinding]:
    from pipeline.compile.run_context import versions

    for name, version in versions(*EXTRAS).items():
        state = "missing" if version == "absent" else "ok"
        remedy = f"not installed; to {EXTRAS[name]}"
        yield DoctorFinding(name, state, version if state == "ok" else remedy)
    api = os.environ.get("PREFECT_API_URL")
    yield DoctorFinding(
        "prefect api", "ok", api or "not configured: steps run in-process; --runner prefect starts a server"
    )


def _registry(registry: str) -> DoctorFinding:
    from enginery.core.errors import EngineryError
    from enginery.registry.store.base import open_store
    from enginery.registry.versions.lookup import models

    try:
        count = len(models(open_store(registry)))
    except EngineryError as error:
        return DoctorFinding("registry", "missing", str(error))
    return DoctorFinding("registry", "ok", f"{registry}: {pluralize(count, 'model')}")
