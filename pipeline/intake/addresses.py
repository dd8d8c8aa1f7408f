"""Where a spec is: a path on this machine, or `registered:MODEL[@DIGEST]`, unpacked from a registry."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders.errors import IntegrityError, SpecError
from builders.workdir import workdir
from pipeline.registry.keys import check_digest
from pipeline.registry.landing import make_folder, reachable
from pipeline.registry.names import check_model
from pipeline.registry.registered import Bundle, find
from pipeline.registry.store import Store, open_store

SCHEME = "registered:"


@contextmanager
def spec_at(address: str, registry: str | None) -> Iterator[Path]:
    """The spec file of an address; an unpacked one is gone afterwards.

    Raises SpecError for a registered spec without a registry, UnknownNameError for one that is not registered,
    IntegrityError when a file of it is lost or damaged.
    """
    if not address.startswith(SCHEME):
        yield Path(address)
        return
    if registry is None:
        raise SpecError([f"{address}: lies in a registry; say in which (registry, ENGINERY_REGISTRY)"])
    model, _, digest = address.removeprefix(SCHEME).partition("@")
    store = open_store(registry)
    found = find(store, check_model(model), check_digest(digest) if digest else None)
    with workdir() as folder:
        yield unpack(store, found.bundle, folder / "spec")


def unpack(store: Store, bundle: Bundle, folder: Path) -> Path:
    """Write a bundle's files into a folder, each verified; the spec file's path."""
    for name, digest in bundle.files.items():
        path = folder / name
        with reachable(f"writing {path}"):
            make_folder(path.parent)
        if not store.has(digest):
            raise IntegrityError(
                f"{name} of the registered {bundle.model} ({bundle.digest[:12]}) is lost; register it again"
            )
        store.fetch(digest, path)
    return folder / bundle.spec
