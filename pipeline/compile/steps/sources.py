"""Content of everything that an export reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders.execution.jobs import Job
from enginery.core.codec import encode
from enginery.core.digest import digest_of_file
from enginery.core.errors import ModelError
from enginery.user_code.source_files import imported_packages, source_files
from pipeline.compile.jobs.model import ExternalFiles, ReadExternalFiles, external_data
from pipeline.compile.run_context import RunContext, import_versions
from pipeline.compile.steps.keys import step_limits
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec

# Protobuf takes up to 90 times a file's size when there is nothing in it but empty nodes: larger files are parsed in a
# process of their own, which has a limit.
_HERE_BYTES = 32 << 20


def source_digests(spec: ModelSpec, context: RunContext) -> Mapping[str, Any]:
    """Content of everything the export reads: the entry point with its local imports, weights, external data; and the
    versions of the packages that the entry point imports."""
    source, packages = spec.source, dict[str, str]()
    files = [spec.file(source.file)]
    if source.kind == "torch":
        packages = import_versions(*imported_packages(spec.folder, files[0]))
        files = list(source_files(spec.folder, files[0]))
    if source.kind == "onnx":
        files += [files[0].parent / name for name in _external_data(spec, context)]
    if source.weights:
        files.append(spec.file(source.weights))
    names = {place_of(file, spec): digest_of_file(file) for file in files if file.is_file()}
    return {"spec": source.model_dump(), "files": names, "packages": packages}


def place_of(file: Path, spec: ModelSpec) -> str:
    """Where a file lies in the spec's folder. Raises ModelError for a link that has come to lead out of it."""
    if not file.resolve().is_relative_to(spec.folder):
        raise ModelError(f"{file} leads outside the spec's folder {spec.folder}; put the file itself inside")
    return str(file.resolve().relative_to(spec.folder))


def _external_data(spec: ModelSpec, context: RunContext) -> list[str]:
    """Names of an ONNX source's external data files, remembered by the model file's content."""
    path = spec.file(spec.source.file)
    key = {"onnx": digest_of_file(path)}
    if (known := context.recall("external-data", key, ExternalFiles)) is None:
        known = _external_names(path, spec, context)
        context.remember("external-data", key, encode(known), [])
    return list(known.files)


def _external_names(path: Path, spec: ModelSpec, context: RunContext) -> ExternalFiles:
    if path.stat().st_size <= _HERE_BYTES:
        return external_data(path, spec.folder)
    name = "read model"
    job = Job(name, ReadExternalFiles(path, spec.folder), limits=step_limits(spec, "export"))
    found = context.run_job(context.local, name, job)
    context.progress.emit(Finished(name))
    return found
