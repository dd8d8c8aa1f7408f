"""The attributions of a version: which node drifted, per graph and engine that failed, kept as blobs beside them."""

from enginery.core import parsing
from enginery.core.codec import decode
from enginery.core.errors import IntegrityError
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from validation.attribution.result import Attribution

# The manifest's sources of this name, with the graph or the unit behind it, are attributions.
ATTRIBUTION = "attribution"
MAX_BYTES = 64 << 20


def attributions(store: Store, manifest: Manifest) -> dict[str, Attribution]:
    """Attribution by the name of the graph or unit. Raises IntegrityError."""
    start = f"{ATTRIBUTION} "
    names = {name.removeprefix(start): digest for name, digest in manifest.sources.items() if name.startswith(start)}
    return {name: read_attribution(store, digest) for name, digest in sorted(names.items())}


def read_attribution(store: Store, digest: str) -> Attribution:
    """One of them. Raises IntegrityError for a damaged blob and another format."""
    try:
        return decode(parsing.parse_json(store.read_blob(digest), MAX_BYTES), Attribution)
    except IntegrityError as error:
        raise IntegrityError(f"blob {digest} is no attribution: {error}; run `enginery attribute` again") from error
