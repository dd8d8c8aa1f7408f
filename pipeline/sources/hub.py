"""Files of a repository on the Hugging Face Hub, at one commit, as files in the folder of the spec that names them.

huggingface_hub downloads them, into its own cache and with its own settings (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). The spec's folder gets hard links to the files in that cache, or copies. So later steps, bundles and
workers read them like every other file of a spec.
"""

import hashlib
import mmap
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import normpath
from pathlib import Path, PurePosixPath

from builders.onnx_graphs.wire import Field, fields, inner_fields, inner_text
from enginesmith.core.errors import InputError, IntegrityError, ModelError, UnavailableError
from enginesmith.core.names import inside
from enginesmith.registry.store.files import make_folder, reachable, start_atomic_write

# The folder, in a spec's folder, for the files of all repositories.
FOLDER = ".hub"
# The fields of ONNX messages that lead to tensors (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_TENSOR, _NODE, _GRAPH, _SPARSE, _FUNCTION, _ATTRIBUTE, _MODEL = range(7)
_INNER = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}
# Field of TensorProto: the location of its bytes, as pairs of key and value.
_EXTERNAL_DATA = 13


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. revision: the commit, 40 hexadecimal digits.  file: its path in the repository.

    cache: huggingface_hub's cache; None for the default one.
    """

    repository: str
    revision: str
    file: str
    cache: Path | None = None

    @property
    def path(self) -> str:
        """Path of the file, relative to the folder of a spec."""
        return f"{FOLDER}/{self.repository}/{self.revision}/{self.file}"

    @property
    def name(self) -> str:
        """Name of the repository, without its owner."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.file} of {self.repository} at {self.revision[:12]}"


def find_cached(path: Path) -> HubFile | None:
    """The Hub's file that a path in huggingface_hub's cache is a copy of; None for any other path."""
    match = re.fullmatch(r"(.*)/models--([^/]+)/snapshots/([0-9a-f]{40})/(.+)", normpath(path.absolute()))
    return HubFile(match[2].replace("--", "/", 1), match[3], match[4], Path(match[1])) if match else None


def fetch(hub_file: HubFile, folder: Path) -> None:
    """Put a file into the folder of a spec, after the external data files of an ONNX file. Do nothing if the file
    exists.

    Raises InputError for a file that the Hub does not have or refuses, ModelError for an invalid ONNX file or one with
    external data outside of its folder, IntegrityError for a damaged cache, and UnavailableError.
    """
    if (folder / hub_file.path).is_file():
        return
    cache_path = _download(hub_file)
    if hub_file.file.endswith(".onnx"):
        for name in list_locations(cache_path):
            data_file = replace(hub_file, file=_beside(hub_file, name))
            if not (folder / data_file.path).is_file():
                _place(_download(data_file), folder / data_file.path)
    _place(cache_path, folder / hub_file.path)


def _beside(hub_file: HubFile, name: str) -> str:
    """The path of an external data file in the repository. Raises ModelError for one outside of the model's folder."""
    try:
        return str(PurePosixPath(hub_file.file).parent / inside(name))
    except ValueError as error:
        raise ModelError(f"{hub_file} keeps data in {name[:80]!r}, which {error}; take another file") from error


def list_locations(path: Path) -> list[str]:
    """The sorted names of an ONNX file's external data files; none is opened. Raises ModelError."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return sorted(set(_locations(data, _MODEL, Field(0, 0, 0, len(data)))))
    except (ValueError, OSError, RecursionError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty, truncated or not an ONNX file; download it again") from error


def _locations(data: mmap.mmap, kind: int, parent: Field) -> Iterator[str]:
    if kind == _TENSOR:
        for pair in inner_fields(data, parent, _EXTERNAL_DATA):
            if inner_text(data, pair, 1) == "location":
                yield inner_text(data, pair, 2)
        return
    for field in fields(data, parent.begin, parent.end):
        if field.number in _INNER[kind]:
            yield from _locations(data, _INNER[kind][field.number], field)


def _download(hub_file: HubFile) -> Path:
    """The file in huggingface_hub's cache; its content matches the digest in its name there. Raises as `fetch`."""
    from huggingface_hub import errors, hf_hub_download

    try:
        path = Path(
            hf_hub_download(hub_file.repository, hub_file.file, revision=hub_file.revision, cache_dir=hub_file.cache)
        )
    except errors.GatedRepoError as error:
        remedy = "accept its terms on its page, and set HF_TOKEN"
        raise InputError(f"{hub_file}: only users who have accepted its terms may download it; {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        remedy = "correct source.hf, or set HF_TOKEN for a private one"
        raise InputError(f"{hub_file}: the Hub has no such repository, or does not show it; {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{hub_file}: the repository has no such commit; correct source.revision") from error
    except errors.LocalEntryNotFoundError as error:
        remedy = (
            f"run `hf download {hub_file.repository} {hub_file.file} --revision {hub_file.revision}` with a network"
        )
        reason = _first_line(error.__cause__ or error)
        raise UnavailableError(
            f"{hub_file}: is not in the cache, and the Hub was not asked or did not answer ({reason}); {remedy}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise InputError(f"{hub_file}: the repository has no such file at this commit; correct source.file") from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError, RuntimeError) as error:
        raise UnavailableError(f"{hub_file}: downloading it failed ({_first_line(error)}); run again") from error
    if hub_file.revision not in path.parts:
        raise IntegrityError(f"{hub_file}: the Hub gave the file of another commit ({path}); run again")
    _check(hub_file, path)
    return path


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _check(hub_file: HubFile, path: Path) -> None:
    """Raise IntegrityError if a file of the cache does not match its name in the cache: the SHA-256 of a large file,
    the SHA-1 of a git blob of others. Caches on file systems without links have no such names."""
    name, size = path.resolve().name, path.stat().st_size
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return
    hasher = hashlib.sha256() if len(name) == 64 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            hasher.update(chunk)
    if hasher.hexdigest() != name:
        raise IntegrityError(f"{hub_file}: {path.resolve()} is damaged; delete it and run again")


def _place(cache_path: Path, path: Path) -> None:
    """Hard-link a file of the cache to a path, or copy it if links are not possible; never leaves a partial file."""
    with reachable(f"writing {path}"):
        make_folder(path.parent)
        with suppress(OSError):
            path.hardlink_to(cache_path.resolve())
            return
        with start_atomic_write(path.parent) as file, cache_path.open("rb") as stream:
            shutil.copyfileobj(stream, file.stream)
            file.commit(path)
