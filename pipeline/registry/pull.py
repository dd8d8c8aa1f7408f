"""Pulling: from a reference and a target to a verified engine on disk, with what a server needs to load it beside it.

The engine lands first and its description last; each appears whole or not at all, and the description names the digest
of the engine it is about. So a server that waits for the description never loads a half engine.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builders.digest import digest_of_file
from builders.types import Target
from pipeline.registry.attestations import judged
from pipeline.registry.landing import reachable, write_whole
from pipeline.registry.manifest import EngineEntry
from pipeline.registry.names import Reference
from pipeline.registry.resolve import Resolution, resolve
from pipeline.registry.store import Store
from pipeline.registry.versions import Located, locate

FORMAT = 1


@dataclass(frozen=True)
class Pulled:
    """An engine on disk. path: the engine.  description: the JSON beside it.  cached: it was there already, sound."""

    path: Path
    description: Path
    located: Located
    resolution: Resolution
    cached: bool

    @property
    def engine(self) -> EngineEntry:
        """The engine that was chosen, with the status it has today."""
        return self.resolution.chosen

    @property
    def warning(self) -> str | None:
        """What a person must know before using it; None when it is proven."""
        if self.engine.status == "proven":
            return None
        return (
            f"UNPROVEN: {self.engine.unit} has never run on its hardware ({self.engine.reason}); "
            f"run `enginery validate {self.located.manifest.model}@{self.located.manifest.version}` there first"
        )


def pull(
    store: Store,
    reference: Reference,
    target: Target,
    dest: Path,
    precision: str | None = None,
    *,
    proven_only: bool = False,
) -> Pulled:
    """Copy the engine that fits best into the folder `dest`, verified, and describe it in JSON.

    Raises UnknownNameError when nothing fits, IntegrityError when the bytes are not what was published,
    UnavailableError when a disk is out of reach.
    """
    located = locate(store, reference)
    manifest = located.manifest
    what = f"{manifest.model}@{manifest.version}"
    only = proven_only or located.proven_only
    resolution = resolve(judged(store, manifest), target, precision, proven_only=only, what=what)
    stem = f"{manifest.model}-{manifest.version}-{resolution.chosen.target}-{resolution.chosen.precision}"
    path = dest / f"{stem}{resolution.chosen.suffix}"
    cached = _fetch(store, str(resolution.chosen.digest), path)
    description = dest / f"{stem}.json"
    write_whole(description, _json(describe(located, resolution.chosen, path.name)))
    return Pulled(path, description, located, resolution, cached)


def describe(located: Located, engine: EngineEntry, file: str) -> dict[str, Any]:
    """What a server needs to load an engine, and where it came from, as JSON."""
    manifest = located.manifest
    origin = {
        "format": FORMAT,
        "file": file,
        "model": manifest.model,
        "version": manifest.version,
        "channel": located.channel.name if located.channel else None,
        "manifest": manifest.digest,
    }
    return origin | {key: value for key, value in asdict(engine).items() if key != "checks"}


def _fetch(store: Store, digest: str, path: Path) -> bool:
    with reachable(f"reading {path}"):
        if path.is_file() and digest_of_file(path) == digest:
            return True
    store.fetch(digest, path)
    return False


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
