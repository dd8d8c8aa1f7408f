"""Where a spec is: a path on this machine, `registered:MODEL[@DIGEST]` of a registry, or a file below `s3://bucket/prefix`.

Whatever is not a file here is copied for as long as it is worked on. What people are told is the address, which can be
typed again, and never the copy's path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builders.execution.workdir import workdir
from enginery.core.digest import check_digest
from enginery.core.errors import InputError, IntegrityError, SpecError
from enginery.core.names import check_model
from enginery.registry.registered_specs import SpecBundle, find
from enginery.registry.store.atomic_write import make_folder, reachable
from enginery.registry.store.base import Store, open_store
from pipeline.intake.places import place_at
from pipeline.spec.file import load_spec
from pipeline.spec.model import ModelSpec

SCHEME = "registered:"


@dataclass(frozen=True)
class Found:
    """A spec's file. address: what `enginery build` takes for the same spec; the path itself unless it is a copy."""

    address: str
    path: Path

    def __str__(self) -> str:
        return self.address

    def load(self) -> ModelSpec:
        """Read it. Raises SpecError."""
        return load_spec(self.path, self.address)


@contextmanager
def spec_at(address: "str | Path | Found", registry: str | None) -> Iterator[Found]:
    """The spec file of an address; a copy is gone afterwards. What was found already stays with whoever found it.

    Raises SpecError for a registered spec without a registry, UnknownNameError for one that is not registered,
    IntegrityError when a file of it is lost or damaged, UnavailableError, InputError.
    """
    if isinstance(address, Found):
        yield address
    elif str(address).startswith(SCHEME):
        with _open_registered(str(address), registry) as found:
            yield found
    elif str(address).startswith("s3://"):
        with _in_bucket(str(address)) as found:
            yield found
    else:
        yield Found(str(address), Path(address))


def unpack(store: Store, bundle: SpecBundle, folder: Path) -> Path:
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


def below(place: str, name: str) -> str:
    """The address of a file below an `s3://` place."""
    prefix, question, options = place.partition("?")
    return f"{prefix.rstrip('/')}/{name}{question}{options}"


@contextmanager
def _open_registered(address: str, registry: str | None) -> Iterator[Found]:
    """With its digest in its address, also where the newest was asked for: another may be the newest tomorrow."""
    if registry is None:
        raise SpecError([f"{address}: lies in a registry; say in which (--registry, ENGINERY_REGISTRY)"])
    model, _, digest = address.removeprefix(SCHEME).partition("@")
    store = open_store(registry)
    found = find(store, check_model(model), check_digest(digest) if digest else None)
    with workdir() as folder:
        yield Found(found.address, unpack(store, found.bundle, folder / "spec"))


@contextmanager
def _in_bucket(address: str) -> Iterator[Found]:
    prefix, question, options = address.partition("?")
    folder, _, name = prefix.rpartition("/")
    if not name.endswith((".yaml", ".yml")):  # all that lies beside it would be copied first: perhaps the whole bucket
        raise InputError(f"{address}: there is no such file; `enginery catalog` takes a place of many specs")
    with place_at(f"{folder}{question}{options}") as place:
        place.refresh()
        path = place.folder / name
        if not path.is_file():
            raise InputError(f"{address}: there is no such file; `enginery catalog` takes a place of many specs")
        yield Found(address, path)
