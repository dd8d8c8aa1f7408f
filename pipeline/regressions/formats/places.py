"""Where a report says that a spec is, and what tells one finding from another in two runs."""

import os
from pathlib import Path
from urllib.parse import quote

from enginesmith.core.digest import digest_of
from pipeline.regressions.findings import Finding


def path_of(spec: str) -> str:
    """The path of a spec below the current folder, with '/'; what is no file of this folder stays as it is."""
    path = Path(os.path.relpath(spec)) if "://" not in spec and not spec.startswith("registered:") else None
    return spec if path is None or path.parts[:1] == ("..",) else path.as_posix()


def uri_of(spec: str) -> str:
    """The same as a URI reference."""
    path = path_of(spec)
    return path if "://" in path else quote(path)


def fingerprint(model: str, found: Finding) -> str:
    """A digest that the same finding has in every run, whatever was measured."""
    return digest_of([model, found.rule, found.unit, found.bucket])
