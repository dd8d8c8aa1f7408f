"""Digests: the one way this project names bytes and values.

A digest is the lower-case hexadecimal SHA-256 (FIPS 180-4) of bytes. A *value* (a spec, a build key, a manifest)
is digested through its canonical JSON: keys sorted, no white space, UTF-8, NaN refused (after RFC 8785, whose
number formatting Python's ``repr`` of a float already meets for the values that occur here).
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether `text` is a well-formed digest; the gate before any digest becomes part of a path."""
    return _DIGEST.fullmatch(text) is not None


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value so that equal values give equal bytes. Raises ValueError on NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(value: Any) -> str:
    """Digest of a JSON value."""
    return digest_of_bytes(canonical_json(value))


def digest_of_bytes(data: bytes) -> str:
    """Digest of bytes in memory."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """Digest of a file's content, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_path(path: Path) -> str:
    """Digest of a file's content; of a folder, over the relative names and contents of all files in it."""
    if not path.is_dir():
        return digest_of_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest_of({file.relative_to(path).as_posix(): digest_of_file(file) for file in files})
