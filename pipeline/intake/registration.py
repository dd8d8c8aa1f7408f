"""Where specs come from: files, folders, object stores, registered bundles."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from builders.execution.local import workdir
from enginesmith.core.codec import encode
from enginesmith.core.errors import (
    ConflictError,
    InputError,
    IntegrityError,
    SpecError,
    UnavailableError,
    canonical_json,
    check_digest,
    digest_of_file,
)
from enginesmith.core.names import check_model, is_path
from enginesmith.core.parsing import user
from enginesmith.core.text import now
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.registered_specs import KEPT, Registration, SpecBundle, find, outside, parse
from enginesmith.registry.store.base import EXAMPLES, Store, bucket_at, change, is_in_bucket, open_store
from enginesmith.registry.store.files import make_folder, reachable, start_atomic_write
from enginesmith.registry.store.layout import DEFAULT_REGISTRY, REGISTRY_VARIABLE, registered_key
from enginesmith.user_code.entry_point import source_files
from pipeline.spec.ensembles.model import EnsembleSpec, LoadedEnsemble, load_any
from pipeline.spec.model import ModelSpec, load_spec

# Bundles contain the files of a spec. A registry stores them, for workers on other machines.
#
# A bundle contains the spec, the source (an entry point with the local modules that it imports, or the model file with
# its external data), weights, calibration data (a generator with its modules) and golden data. An ensemble's bundle
# contains the files of its graphs and the data of the whole. A bundle lacks files that only running the code would
# show: installed packages, modules imported by a computed name, and files that the code opens.

# A spec of either kind.
Spec = ModelSpec | LoadedEnsemble

# The greatest number of files of a bundle, and their greatest total size.
MOST_FILES = 5000
MOST_BYTES = 64 << 30


def bundle_of(spec: Spec, digest: Callable[[Path], str] = digest_of_file, most_bytes: int = MOST_BYTES) -> SpecBundle:
    """The bundle of a spec's files as they are now. digest: returns a file's digest; it may store the file.

    Raises InputError for over `MOST_FILES` files or `most_bytes` bytes and for a file outside of the spec's folder,
    ModelError for a source that cannot be read, and UnavailableError.
    """
    files = dict(sorted(named_files(spec)))
    if len(files) > MOST_FILES:
        raise InputError(
            f"{spec.path}: names {len(files)} files; a bundle holds at most {MOST_FILES}: store many samples in one "
            "file (.npz or safetensors)"
        )
    with reachable(f"reading the files of {spec.path}"):
        size = sum(path.stat().st_size for path in files.values())
        if size > most_bytes:
            raise InputError(
                f"{spec.path}: its files have {size} bytes together; a bundle holds at most {most_bytes}: keep fewer "
                "samples, or build it by its path on a machine that can read it"
            )
        return SpecBundle(spec.model, spec.path.resolve().name, {name: digest(path) for name, path in files.items()})


def named_files(spec: Spec) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file of a spec; the name is relative to the spec's folder.

    Raises InputError for a file outside of the folder, ModelError for a source that cannot be read.
    """
    for path in _paths(spec):
        if not path.resolve().is_relative_to(spec.folder):
            raise InputError(f"{path} leads outside the spec's folder {spec.folder}; put the file itself inside")
        name = path.relative_to(spec.folder).as_posix()
        if reason := outside(name):
            raise InputError(f"{spec.path}: file {name!r} {reason}")
        yield name, path


def _paths(spec: Spec) -> Iterator[Path]:
    yield spec.path.resolve()
    if isinstance(spec, LoadedEnsemble):
        yield from (spec.spec.file(name) for _, name in spec.spec.named_files())
        for function in spec.functions().values():
            yield from (spec.folder / name for name in function.files)
        for graph in spec.graphs.values():
            yield from _paths(graph)
        return
    source = spec.file(spec.source_file)
    for _, name in spec.named_files():
        path = spec.file(name)
        yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)
    if spec.source.kind == "torch":
        yield from source_files(spec.folder, source, spec.source.module)
    elif spec.source.kind == "onnx":
        from pipeline.sources.onnx_model import external_files

        yield from external_files(source, spec.folder)
    if spec.calibration and spec.calibration.function:
        yield from source_files(spec.folder, spec.file(spec.calibration.file))


def register(store: Store, spec: Spec, most_bytes: int = MOST_BYTES) -> tuple[Registration, bool]:
    """Store a spec and its files in a registry: the newest registration of its model, and whether it existed before.

    Raises InputError and ModelError as `bundle_of`, ConflictError if garbage collection deletes files meanwhile.
    """
    with hold_lease(store, f"registering {spec.model}") as lease:
        bundle = bundle_of(spec, store.put_file, most_bytes)
        lease.secure(bundle.files.values())
        if lost_names := [name for name, digest in bundle.files.items() if not store.has(digest)]:
            raise ConflictError(f"{spec.path}: {lost_names[0]} was collected while it was registered; run again")
        return _append(store, Registration(bundle, now(), user()))


def _append(store: Store, new: Registration) -> tuple[Registration, bool]:
    """Add a registration unless the newest has the same bundle: the newest, and whether it existed before."""
    model, has_tried = new.bundle.model, False

    def appended(data: bytes | None) -> bytes | None:
        nonlocal has_tried
        entries = parse(data, model)
        if entries and entries[-1].bundle.digest == new.bundle.digest:
            return None
        has_tried = True
        other_entries = [registration for registration in entries if registration.bundle.digest != new.bundle.digest]
        return canonical_json({"registered": encode([*other_entries, new][-KEPT:])})

    newest = parse(change(store, registered_key(model), appended), model)[-1]
    return newest, not (has_tried and newest == new)


# Where specs and their data are: folders, prefixes of buckets, and `registered:MODEL[@DIGEST]` of a registry.
#
# Files of other machines are copied for as long as they are used. Messages contain the address, which a user can type
# again, and never the copy's path. This module only reads places.

# The greatest number of objects below a spec's prefix of a bucket; all of them are copied.
MOST_OBJECTS = 100_000


@dataclass(frozen=True)
class FolderPlace:
    """A place that is a folder of this machine, used without a copy."""

    folder: Path

    def refresh(self) -> None:
        """Raise UnavailableError where the folder is missing."""
        if not self.folder.is_dir():
            raise UnavailableError(
                f"{self.folder} does not exist or is not a folder; create it, or name another folder"
            )

    def has(self, name: str) -> bool:
        """Whether the folder contains a file. Raises UnavailableError if the folder is missing."""
        self.refresh()
        return (self.folder / name).is_file()


@dataclass
class Bucket:
    """A place that is a prefix of a bucket, with a local copy of its files. Only changed files are fetched."""

    uri: str
    folder: Path
    most_bytes: int = MOST_BYTES
    _known: dict[str, str] = field(default_factory=dict)

    def refresh(self) -> None:
        """Update the copy to equal the bucket. Raises UnavailableError, and InputError for too much data."""
        from enginesmith.registry.store.objects.api import objects_below

        bucket = bucket_at(self.uri)
        bucket_objects = {entry.name: entry for entry in objects_below(bucket) if is_path(entry.name)}
        size = sum(entry.size for entry in bucket_objects.values())
        if len(bucket_objects) > MOST_OBJECTS or size > self.most_bytes:
            raise InputError(
                f"{bucket.place.locator('')} holds {len(bucket_objects)} objects with {size} bytes; "
                f"at most {MOST_OBJECTS} with {self.most_bytes} are copied: name a prefix of its own for the specs"
            )
        for name in self._known.keys() - bucket_objects.keys():
            (self.folder / name).unlink(missing_ok=True)
            del self._known[name]
        for name, entry in bucket_objects.items():
            if self._known.get(name) != entry.tag:
                self._fetch(name)
                self._known[name] = entry.tag

    def has(self, name: str) -> bool:
        """Whether the bucket contains a file; fetches none. Raises UnavailableError."""
        from enginesmith.registry.store.objects.api import objects_below

        return any(entry.name == name for entry in objects_below(bucket_at(self.uri)))

    def _fetch(self, name: str) -> None:
        from enginesmith.registry.store.objects.api import Declined
        from enginesmith.registry.store.objects.reading import stream_blob

        path = self.folder / name
        with reachable(f"writing {path}"):
            make_folder(path.parent)
            with start_atomic_write(path.parent) as file:
                try:
                    stream_blob(bucket_at(self.uri), name, file.stream, self.most_bytes)
                except Declined as error:
                    raise UnavailableError(f"{self.uri}: {name} was deleted while it was read; try again") from error
                file.commit(path)


Place = FolderPlace | Bucket


@contextmanager
def place_at(text: str) -> Iterator[Place]:
    """The place of a path, a `file://` URI or a bucket URI; a copy is deleted with the context. Raises InputError."""
    if is_in_bucket(text):
        with workdir() as folder:
            yield Bucket(text, folder / "copy")
        return
    if "://" not in text:
        yield FolderPlace(Path(text).expanduser())
        return
    url = urlsplit(text)
    if url.scheme != "file" or url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise InputError(f"{text[:200]!r} is not a place; give a folder, file:///folder, {EXAMPLES}")
    yield FolderPlace(Path(unquote(url.path)))


def files_below(folder: Path) -> Iterator[Path]:
    """Files in a folder and below, sorted, without hidden files and folders."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


SCHEME = "registered:"


@dataclass(frozen=True)
class Found:
    """A spec's local file. address: `enginesmith build` accepts it for the same spec; the path unless it is a copy."""

    address: str
    path: Path

    def __str__(self) -> str:
        return self.address

    def load(self) -> ModelSpec:
        """The spec. Raises SpecError."""
        return load_spec(self.path, self.address)


@contextmanager
def spec_at(address: "str | Path | Found", registry: str | None) -> Iterator[Found]:
    """The spec file of an address; a copy is deleted with the context. A `Found` is returned unchanged.

    Raises SpecError for a registered spec without a registry, UnknownNameError for a spec that is not registered,
    IntegrityError if a file is lost or damaged, UnavailableError, and InputError for a missing object.
    """
    text = str(address)
    if isinstance(address, Found):
        yield address
    elif text.startswith(SCHEME) or is_in_bucket(text):
        uri = registry or os.environ.get(REGISTRY_VARIABLE)
        with _open_registered(text, uri) if text.startswith(SCHEME) else _in_bucket(text) as spec_place:
            yield spec_place
    else:
        yield Found(text, Path(address))


def registry_of(spec: "ModelSpec | EnsembleSpec | Found | Path | str | None", stated_registry: str | None) -> str:
    """The registry that a run uses, as a URI or path: the first of --registry (`stated_registry`), the variable
    ENGINESMITH_REGISTRY, the spec's publication.registry (a relative path is relative to the spec's folder) and
    ./registry. spec: or its address, which is read only if the first two are missing.  Raises SpecError."""
    if location := stated_registry or os.environ.get(REGISTRY_VARIABLE):
        return location
    if isinstance(spec, str | Path | Found):
        with spec_at(spec, None) as spec_place:
            loaded_spec = load_any(spec_place.path, spec_place.address)
            return registry_of(loaded_spec if isinstance(loaded_spec, ModelSpec) else loaded_spec.spec, None)
    spec_registry = spec.publication.registry if spec else None
    return (
        str(spec.file(spec_registry))
        if spec and spec_registry and "://" not in spec_registry
        else spec_registry or DEFAULT_REGISTRY
    )


def below(place: str, name: str) -> str:
    """The address of a file below a place in a bucket."""
    prefix, question, options = place.partition("?")
    return f"{prefix.rstrip('/')}/{name}{question}{options}"


@contextmanager
def _open_registered(address: str, registry: str | None) -> Iterator[Found]:
    """A copy of a registered spec's verified files. The address always includes the digest, because a newer spec may
    be registered later."""
    if registry is None:
        raise SpecError([f"{address}: is in a registry; name the registry (--registry, {REGISTRY_VARIABLE})"])
    model, _, digest = address.removeprefix(SCHEME).partition("@")
    store = open_store(registry)
    registration = find(store, check_model(model), check_digest(digest) if digest else None)
    bundle = registration.bundle
    with workdir() as folder:
        for name, file_digest in bundle.files.items():
            path = folder / "spec" / name
            with reachable(f"writing {path}"):
                make_folder(path.parent)
            if not store.has(file_digest):
                short_digest = bundle.digest[:12]
                raise IntegrityError(
                    f"{name} of the registered {bundle.model} ({short_digest}) is lost; register it again"
                )
            store.fetch(file_digest, path)
        yield Found(registration.address, folder / "spec" / bundle.spec)


@contextmanager
def _in_bucket(address: str) -> Iterator[Found]:
    prefix, question, options = address.partition("?")
    folder, _, name = prefix.rpartition("/")
    error = InputError(f"{address}: there is no such file; `enginesmith build --all` takes a place of many specs")
    if not name.endswith((".yaml", ".yml")):  # a copy would fetch the whole folder first
        raise error
    with place_at(f"{folder}{question}{options}") as location:
        location.refresh()
        path = location.folder / name
        if not path.is_file():
            raise error
        yield Found(address, path)
