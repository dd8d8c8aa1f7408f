"""The files that make up a spec, and a registry that keeps them, so that workers elsewhere can build it.

A bundle holds the spec, the source (an entry point with the local modules that it imports, or the model file with its
external data), weights, calibration data (a generator with its modules) and golden data; that of an ensemble holds the
bundles of its graphs and data of the whole. It lacks what only running the code would show: installed packages, modules
imported by a computed name, and files that the code opens.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from enginesmith.core.codec import encode
from enginesmith.core.digest import canonical_json, digest_of_file
from enginesmith.core.errors import ConflictError, InputError
from enginesmith.core.origin import user
from enginesmith.core.text import now
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.registered_specs import KEPT, Registration, SpecBundle, outside, parse
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.files import reachable
from enginesmith.registry.store.layout import registered_key
from enginesmith.user_code.entry_point import source_files
from pipeline.spec.ensembles.model import LoadedEnsemble
from pipeline.spec.model import ModelSpec

# A spec of either kind.
Spec = ModelSpec | LoadedEnsemble

# The greatest number of files of a bundle, and of their bytes.
MOST_FILES = 5000
MOST_BYTES = 64 << 30


def bundle_of(spec: Spec, digest: Callable[[Path], str] = digest_of_file, most_bytes: int = MOST_BYTES) -> SpecBundle:
    """The bundle of a spec's files as they are now. digest: gives a file's digest, and may store the file.

    Raises InputError for over `MOST_FILES` files or `most_bytes` bytes and for a file outside of the spec's folder,
    ModelError for a source that cannot be read, and UnavailableError.
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
        return SpecBundle(spec.model, spec.path.resolve().name, {name: digest(path) for name, path in files.items()})


def named_files(spec: Spec) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file of a spec; the name is relative to the spec's folder, as the spec has it.

    Raises InputError for a file that leads out of the folder, ModelError for a source that cannot be read.
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

    Raises InputError and ModelError as `bundle_of`, and ConflictError when files are collected meanwhile.
    """
    with hold_lease(store, f"registering {spec.model}") as guard:
        bundle = bundle_of(spec, store.put_file, most_bytes)
        guard.secure(bundle.files.values())
        if lost := [name for name, digest in bundle.files.items() if not store.has(digest)]:
            raise ConflictError(f"{spec.path}: {lost[0]} was collected while it was registered; run again")
        return _append(store, Registration(bundle, now(), user()))


def _append(store: Store, new: Registration) -> tuple[Registration, bool]:
    """Add a registration, unless the newest one is the same: the newest one, and whether it existed before."""
    model, tried = new.bundle.model, False

    def appended(data: bytes | None) -> bytes | None:
        nonlocal tried
        before = parse(data, model)
        if before and before[-1].bundle.digest == new.bundle.digest:
            return None
        tried = True
        others = [item for item in before if item.bundle.digest != new.bundle.digest]
        return canonical_json({"registered": encode([*others, new][-KEPT:])})

    newest = parse(change(store, registered_key(model), appended), model)[-1]
    return newest, not (tried and newest == new)
