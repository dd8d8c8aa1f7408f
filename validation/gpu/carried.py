"""Published engines that were carried to this machine in a folder, to be run here and judged elsewhere.

    carry.json             model, version and manifest that they are of; of each engine its digest, request and file
    cases.json, cases.npz  the golden cases
    engines/               the engines' files

`enginery validate REF --carry FOLDER` writes it; `enginery validate --import RESULTS` judges what came of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.digest import canonical_json, digest_of_file, is_digest
from enginery.core.errors import IntegrityError
from enginery.core.types import BuildRequest, Scalar

KIND, FORMAT = "enginery-carried", 1
Json = dict[str, Any]
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class CarriedEngine:
    """One engine. path: its file."""

    digest: str
    request: BuildRequest
    path: Path

    @property
    def options(self) -> dict[str, Scalar]:
        """The backend's."""
        return dict(self.request.options)


@dataclass(frozen=True)
class Carried:
    """What a folder holds. manifest, golden: digests of the version's manifest and golden set."""

    model: str
    version: str
    manifest: str
    golden: str
    engines: tuple[CarriedEngine, ...]
    folder: Path

    def save(self) -> None:
        """Write carry.json; the files that it names are there already."""
        engines = [
            {"digest": item.digest, "request": item.request.to_json(), "file": item.path.name} for item in self.engines
        ]
        plain = {"model": self.model, "version": self.version, "manifest": self.manifest, "golden": self.golden}
        document = {"kind": KIND, "format": FORMAT, **plain, "engines": engines}
        (self.folder / "carry.json").write_bytes(canonical_json(document))

    @classmethod
    def load(cls, folder: Path) -> "Carried":
        """Read a folder and check its engines' digests. Raises IntegrityError for another, or a damaged one."""
        try:
            document: Any = json.loads((folder / "carry.json").read_bytes())
            if (document["kind"], document["format"]) != (KIND, FORMAT):
                raise ValueError(f"kind {str(document['kind'])[:40]}, format {str(document['format'])[:40]}")
            names = {name: document[name] for name in ("model", "version", "manifest", "golden")}
            if not all(isinstance(name, str) for name in names.values()):
                raise TypeError("its names are no text")
            return cls(**names, engines=tuple(_engines(document, folder)), folder=folder)
        except _BROKEN as error:
            raise IntegrityError(
                f"{folder} was not written by `enginery validate --carry` ({str(error)[:200]}); carry it anew"
            ) from error


def _engines(document: Json, folder: Path) -> Iterator[CarriedEngine]:
    for item in document["engines"]:
        digest, name = item["digest"], item["file"]
        if not is_digest(digest) or Path(name).name != name:
            raise ValueError(f"engine {str(digest)[:80]!r} in {str(name)[:80]!r}")
        path = folder / "engines" / name
        if digest_of_file(path) != digest:
            raise ValueError(f"{path.name} was changed on the way")
        yield CarriedEngine(digest, BuildRequest.from_json(item["request"]), path)
