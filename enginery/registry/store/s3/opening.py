"""The door to a registry in a bucket: is there one, may there be one, and can it be published to."""

from enginery.core.errors import UnavailableError
from enginery.registry.store.keys import MARKER
from enginery.registry.store.marker import CONTENT, check_format, refuse_other
from enginery.registry.store.s3.listing import names_below
from enginery.registry.store.s3.place import Place, parse_place
from enginery.registry.store.s3.probe import require_conditional_writes
from enginery.registry.store.s3.reading import read_document
from enginery.registry.store.s3.store import S3Store
from enginery.registry.store.s3.writing import ABSENT, write

# At the door a wrong endpoint is likelier than a bad moment.
_ATTEMPTS = 4


def open_bucket(uri: str, *, create: bool) -> S3Store:
    """Open the registry at an s3:// URI, or make one. Raises InputError and UnavailableError; see `open_store`."""
    place = parse_place(uri)
    marker = read_document(place, MARKER, attempts=_ATTEMPTS)
    if marker is not None:
        check_format(marker[0], place.locator(""))
    elif not create:
        raise UnavailableError(
            f"there is no registry at {place.locator('')}; `enginery build` makes one, or set --registry"
        )
    else:
        _make(place)
    store = S3Store(place)
    if create:
        require_conditional_writes(place)
        store.sweep()
    return store


def _make(place: Place) -> None:
    others = [name for name in names_below(place, "") if name != MARKER]
    if others:
        refuse_other([name.removesuffix("/") for name in others], place.locator(""), "give a prefix of its own")
    write(place, MARKER, CONTENT, ABSENT)
