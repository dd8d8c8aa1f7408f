"""Digests, by which all stored bytes and values are named.

A digest is the lower-case hexadecimal SHA-256 (FIPS 180-4) of bytes. A *value* (a spec, a build key, a manifest)
is digested through its canonical JSON: keys sorted, no white space, UTF-8, NaN refused (after RFC 8785, whose
number formatting Python's ``repr`` of a float already meets for the values that occur here).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from annotated_types import Predicate, doc

from enginesmith.core.errors import InputError

CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_IN_BYTES = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hexadecimal digits; checked before any digest becomes part of a path."""
    return _DIGEST.fullmatch(text) is not None


Digest = Annotated[str, Predicate(is_digest), doc("a SHA-256 in hexadecimal")]


def check_digest(digest: str) -> str:
    """Return `digest` if it is one. Raises InputError."""
    if is_digest(digest):
        return digest
    raise InputError(f"{digest!r} is not a digest: 64 lower-case hexadecimal digits of a SHA-256 are")


def digests_in(data: bytes) -> Iterator[str]:
    """Every run of exactly 64 hexadecimal digits in a document: each may be a digest."""
    return (found.decode() for found in _IN_BYTES.findall(data))


def canonical_json(value: object) -> bytes:
    """Encode a JSON value so that equal values give equal bytes. Raises ValueError on NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(value: object) -> str:
    """SHA-256 of a JSON value's canonical encoding. Raises ValueError on NaN and infinities."""
    return digest_of_bytes(canonical_json(value))


def digest_of_bytes(data: bytes) -> str:
    """SHA-256 of bytes in memory."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's content, read in blocks. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_path(path: Path) -> str:
    """SHA-256 of a file's content; of a folder, over the relative names and digests of all files in it."""
    if not path.is_dir():
        return digest_of_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest_of({file.relative_to(path).as_posix(): digest_of_file(file) for file in files})
