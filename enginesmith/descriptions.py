"""Reads the JSON beside a pulled engine, and the files that it names, which must be in its folder and have the
published bytes.

A person who can write to the folder can also write another JSON with other digests. The checks ensure that the opened
files belong together, and came from the version that the JSON names.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from enginesmith.core.codec import Excerpt, decode, refuse_newer
from enginesmith.core.errors import DataError, Digest, IntegrityError, digest_of_bytes, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.names import FileName
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.requirements import LIBRARY_ENTRY, Count, Library, Requirement, numbers
from enginesmith.core.state import DESCRIPTION_FORMAT, State
from enginesmith.core.types import ShapeProfile, TensorSpec

# The maximum size of a description.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class DescribedGraph(Excerpt):
    """The inputs, outputs and profiles of an engine, from the JSON beside it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[ShapeProfile, ...]


@dataclass(frozen=True)
class DescribedStates(Excerpt):
    """The inputs and states of an engine, and the smallest and largest size of dims that only states have."""

    inputs: tuple[TensorSpec, ...]
    state: tuple[State, ...]
    ends: Mapping[str, tuple[Count, Count]]


@dataclass(frozen=True)
class _EngineFiles(Excerpt):
    """The files of an engine. graph: digest of `weights`, the model with the engine's weights."""

    file: FileName
    digest: Digest
    shards: tuple[Digest, ...] = ()
    weights: FileName | None = None
    graph: Digest | None = None
    requires: tuple[Requirement, ...] = ()


class OtherBytesError(IntegrityError):
    """A file with other bytes than were published."""


Described = TypeVar("Described")


def decode_description(document: Mapping[str, object], kind: type[Described], path: Path | str) -> Described:
    """A description as a value of type `kind`. path: its file. Raises DataError with the field's name."""
    try:
        return decode(document, kind, "")
    except Malformed as error:
        raise DataError(f"{path} describes no engine: {error}; pull it again") from error


def read_description(path: Path | str) -> dict[str, object]:
    """The JSON beside a pulled engine. Raises DataError if the file is no description, or of a newer release."""
    try:
        with Path(path).open("rb") as stream:
            document = parse_json(stream.read(MOST_BYTES + 1), MOST_BYTES)
        refuse_newer("its description", document.get("format"), DESCRIPTION_FORMAT)
        return document
    except (OSError, IntegrityError) as error:
        raise DataError(f"{path} describes no engine: {error}") from error


def find_file(folder: Path, name: str) -> Path:
    """The resolved path of the file `name` in a folder. Raises DataError unless it is a file below the folder."""
    path = folder / name
    try:
        real_path = path.resolve(strict=True)
        if not real_path.is_relative_to(folder.resolve()) or not real_path.is_file():
            raise DataError(f"{path} is not a file below {folder}; pull it again")
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        raise DataError(f"{path} cannot be opened: {error}; pull it again") from error
    return real_path


def read_file(path: Path, digest: str) -> bytes:
    """The bytes of a file, read once and checked. digest: their expected SHA-256. Raises DataError for an unreadable
    file, OtherBytesError."""
    with _readable(path):
        content = path.read_bytes()
    _check_digest(path, digest_of_bytes(content), digest)
    return content


def find_engine(description: Path, document: Mapping[str, object]) -> Path:
    """The engine's file, links followed. document: its description's content. Raises DataError if it names none."""
    return find_file(description.parent, decode_description(document, _EngineFiles, description).file)


def read_engine(description: Path, document: Mapping[str, object]) -> bytes:
    """The engine's bytes, read once and checked. Its shards are checked too; the runtime opens them itself.

    Raises as `find_engine`, and OtherBytesError.
    """
    digest = _check_beside(description, document)
    return read_file(find_engine(description, document), digest)


def check_engine(description: Path, document: Mapping[str, object]) -> Path:
    """The engine's file, links followed, after checking its digest and those of its files beside it. Raises as
    `read_engine`."""
    digest, path = _check_beside(description, document), find_engine(description, document)
    _check_file(path, digest)
    return path


def find_libraries(description: Path, document: Mapping[str, object]) -> list[Path]:
    """The checked libraries of operators of an ONNX Runtime engine for this machine. Raises as `find_library`."""
    requirements = decode_description(document, _EngineFiles, description).requires
    libraries = [library for library in requirements if isinstance(library, Library) and library.entry == LIBRARY_ENTRY]
    return [find_library(description.parent, library) for library in libraries]


def find_library(folder: Path, library: Library) -> Path:
    """A library's file in a folder, in the build for this machine, links followed, after checking its digest.

    Raises DataError if it has no build for this machine or the file is missing, OtherBytesError.
    """
    platform, cuda_major = f"{sys.platform}-{this_kind().machine}", 0
    if any(build.cuda for build in library.builds):
        from enginesmith.core.hardware.cuda import cuda_version

        cuda_major = numbers(cuda_version() or "0")[0]
    if (build := library.build_for(platform, cuda_major)) is None:
        raise DataError(library.explain_absence(platform, cuda_major))
    _check_file(path := find_file(folder, build.sha256), build.sha256)
    return path


def _check_beside(description: Path, document: Mapping[str, object]) -> str:
    """The digest of the engine, after checking those of its shards and of the model with its weights."""
    folder, engine_bytes = description.parent, decode_description(document, _EngineFiles, description)
    for shard in engine_bytes.shards:
        _check_file(find_file(folder, shard), shard)
    if engine_bytes.weights:
        _check_file(find_file(folder, engine_bytes.weights), engine_bytes.graph or "")
    return engine_bytes.digest


def _check_file(path: Path, digest: str) -> None:
    with _readable(path):
        _check_digest(path, digest_of_file(path), digest)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; pull it again") from error


def _check_digest(path: Path, digest: str, published: str) -> None:
    if digest != published:
        raise OtherBytesError(f"{path} has the digest {digest[:12]}, but {published[:12]} was published; pull it again")
