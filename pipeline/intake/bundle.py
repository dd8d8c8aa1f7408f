"""A spec with the files that it names, as one value by digest, so that a worker elsewhere can build it.

In it are the spec, the source (an entry point with the local modules that it imports, or the model file with its
external data), weights, calibration data (a generator with its modules) and golden data. Not in it is what only running
the code would show: installed packages, modules imported by a computed name, and files that the code opens by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from builders.digest import digest_of, digest_of_file
from builders.errors import InputError
from pipeline.registry import parsing
from pipeline.registry.landing import reachable
from pipeline.registry.parsing import Malformed
from pipeline.sources.source_files import source_files
from pipeline.spec.model import ModelSpec
from pipeline.spec.words import inside

MOST_FILES = 5000
MOST_BYTES = 64 << 30


@dataclass(frozen=True)
class Bundle:
    """A model's spec and its files. spec: the spec file's name.  files: path below the spec's folder -> digest."""

    model: str
    spec: str
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """What names it: equal files under equal names are the same bundle, wherever they lie."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """As a registry keeps it."""
        return {"model": self.model, "spec": self.spec, "files": dict(self.files)}

    @classmethod
    def from_json(cls, value: Any, path: str = "bundle") -> "Bundle":
        """Read back. Raises Malformed; also for a path that would lead out of the folder it is unpacked into."""
        data = parsing.mapping(value, path)
        files = parsing.field(data, "files", parsing.mapping_of(parsing.digest), path)
        for name in files:
            if reason := _outside(name):
                raise Malformed(f"{path}.files: {name[:80]!r} {reason}")
        spec = parsing.field(data, "spec", parsing.text, path)
        if spec not in files:
            raise Malformed(f"{path}.spec is {spec[:80]!r}, which is none of its files")
        return cls(parsing.field(data, "model", parsing.name, path), spec, files)


def bundle_of(spec: ModelSpec, digest: Callable[[Path], str] = digest_of_file, most_bytes: int = MOST_BYTES) -> Bundle:
    """The bundle of a spec as its files are now.

    digest: gives a file's digest, and may store the file as it does.
    Raises InputError for more than `MOST_FILES` files, more than `most_bytes`, or a file outside the spec's folder;
    ModelError for a source that cannot be read; UnavailableError.
    """
    files = dict(sorted(named_files(spec)))
    if len(files) > MOST_FILES:
        raise InputError(
            f"{spec.path}: names {len(files)} files; a bundle holds {MOST_FILES} at most: store many samples in one "
            "file (.npz or safetensors)"
        )
    with reachable(f"reading the files of {spec.path}"):
        size = sum(path.stat().st_size for path in files.values())
        if size > most_bytes:
            raise InputError(
                f"{spec.path}: its files have {size} bytes together; a bundle holds {most_bytes} at most: keep fewer "
                "samples, or build it by its path on a machine that sees it"
            )
        return Bundle(spec.model, spec.path.resolve().name, {name: digest(path) for name, path in files.items()})


def named_files(spec: ModelSpec) -> Iterator[tuple[str, Path]]:
    """Name and place of each file of a spec; a name is as the spec has it, relative to its folder.

    Raises InputError for a file that leads out of the folder, ModelError for a source that cannot be read.
    """
    for path in _paths(spec):
        if not path.resolve().is_relative_to(spec.folder):
            raise InputError(f"{path} leads outside the spec's folder {spec.folder}; put the file itself inside")
        name = path.relative_to(spec.folder).as_posix()
        if reason := _outside(name):
            raise InputError(f"{spec.path}: file {name!r} {reason}")
        yield name, path


def _paths(spec: ModelSpec) -> Iterator[Path]:
    yield spec.path.resolve()
    yield from _source_paths(spec)
    golden = spec.golden.data if spec.golden else None
    for name in (spec.source.weights, golden, spec.calibration.file if spec.calibration else None):
        if name is not None:
            path = spec.file(name)
            yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)
    if spec.calibration and spec.calibration.function:
        yield from source_files(spec.folder, spec.file(spec.calibration.file))


def _source_paths(spec: ModelSpec) -> Iterator[Path]:
    path = spec.file(spec.source.file)
    yield path
    if spec.source.kind == "torch":
        yield from source_files(spec.folder, path)
    elif spec.source.kind == "onnx":
        from pipeline.sources.onnx_model import external_files

        yield from external_files(path, spec.folder)


def _outside(name: str) -> str | None:
    """Why a name cannot be unpacked below a folder; None if it can."""
    try:
        inside(name)
    except ValueError as error:
        return str(error)
    return None
