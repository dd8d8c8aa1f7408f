"""The quantization records of a version: what quantizing did, per graph, kept as blobs beside the graphs."""

from typing import Any

from enginery.core import parsing
from enginery.core.errors import IntegrityError
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store

# The manifest's sources of this name, with the flavour behind it, are records.
RECORD = "quantization"
# And of this name, recipes: how a graph was written (`pipeline.compile.jobs.graphs`).
RECIPE = "recipe"
FORMAT = 1
MAX_BYTES = 64 << 20


def quantization_records(store: Store, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Record by the flavour's name, as `pipeline.quantization.record` describes it. Raises IntegrityError."""
    names = {name.removeprefix(f"{RECORD} "): digest for name, digest in manifest.sources.items() if _is_record(name)}
    return {flavour: _read(store, flavour, digest) for flavour, digest in sorted(names.items())}


def _is_record(source: str) -> bool:
    return source.startswith(f"{RECORD} ")


def _read(store: Store, flavour: str, digest: str) -> dict[str, Any]:
    record = parsing.parse_json(store.read_blob(digest), MAX_BYTES)
    if record.get("format") != FORMAT:
        raise IntegrityError(f"the quantization record of {flavour} is not of format {FORMAT}: upgrade enginery")
    return record
