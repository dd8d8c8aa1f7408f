"""Errors with their exit codes, digests, and addresses of servers.

>>> import enginesmith
>>> try:
...     enginesmith.pull("nothing:stable", registry="registry", dest="engines")
... except enginesmith.errors.UnknownNameError as error:
...     print(error.exit_code, error)  # doctest: +ELLIPSIS
2 no model 'nothing' in file:///.../registry; known: tiny
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from annotated_types import Predicate, doc

# Failed builds and failed checks are values, not errors: see `BuildFailure` and
# `enginesmith.core.reports.proof.Report`.


class EnginesmithError(Exception):
    """Base of all errors that a command prints without a traceback."""

    exit_code = 1


class InputError(EnginesmithError):
    """Wrong input from the user."""

    exit_code = 2


class SpecError(InputError):
    """A spec with mistakes: one line for each, with the key's path, the value and the remedy."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)

    def __reduce__(self) -> "tuple[type[SpecError], tuple[tuple[str, ...]]]":
        return (SpecError, (self.lines,))


class ModelError(InputError):
    """A model that cannot be read, exported or checked."""


class DataError(InputError):
    """Calibration or golden data that does not fit the model."""


class UnknownNameError(InputError):
    """A reference, target, precision or channel that does not exist."""


class UnavailableError(EnginesmithError):
    """A service or resource that the run needs (registry, Ray, Prefect, disk) cannot be reached."""

    exit_code = 3


class UndecidedError(UnavailableError):
    """The reply to a conditional write was lost, and the present content does not show whether the write succeeded."""


class IntegrityError(EnginesmithError):
    """Stored bytes do not match their digest, or a document is malformed."""


class UntrustedError(IntegrityError):
    """A version lacks signatures that this client's trust policy requires."""


class ConflictError(EnginesmithError):
    """Another publisher already wrote other content under the same name. nothing_written: True if the error was raised
    before the first write."""

    nothing_written = False


class StepError(EnginesmithError):
    """A step that ran in its own process failed. log: the end of its output.

    kind: 'error' (an exception, or an exit without a result), 'crash' (a signal, or its worker died), 'timeout',
    'memory' (above its own limit), 'node-memory' (its node ran out), 'node-lost', 'no-node' (no node fits, or no GPU),
    'cancelled'.  peak_mib: the largest memory use measured, 0 if unknown.
    """

    def __init__(self, message: str, kind: str = "error", log: str = "", peak_mib: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.log = log
        self.peak_mib = peak_mib

    def __reduce__(self) -> "tuple[type[StepError], tuple[str, str, str, float]]":
        return (StepError, (str(self), self.kind, self.log, self.peak_mib))


def error_to_json(error: EnginesmithError) -> dict[str, object]:
    """An error's class and constructor arguments as JSON; for classes of other modules, the nearest base class here."""
    error_class = next(cls for cls in type(error).__mro__ if cls.__module__ == __name__)
    arguments = error.__reduce__()[1] if type(error) is error_class else (str(error),)
    return {"error": error_class.__name__, "arguments": arguments}


def error_from_json(data: Mapping[str, object]) -> EnginesmithError:
    """The error that `error_to_json` encoded."""
    arguments = data.get("arguments")
    error: EnginesmithError = globals()[str(data.get("error"))](
        *(arguments if isinstance(arguments, list | tuple) else ())
    )
    return error


@dataclass(frozen=True)
class HttpAddress:
    """The address of a server. port: 0 means any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to the address."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str, default_host: str = "") -> HttpAddress:
    """Parse an address: '127.0.0.1:8080', '[::]:8080', or ':8080' on the default host if one is given.

    Raises InputError.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or default_host
    if not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise InputError(f"{text[:80]!r} is not an address to listen on; give HOST:PORT, as in 127.0.0.1:8900")
    return HttpAddress(host, int(port))


def read_token(variable: str) -> str:
    """The token in an environment variable, stripped; '' if the variable is unset.

    Raises InputError for a token that no HTTP header can contain.
    """
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise InputError(f"{variable} holds no token: one line of ASCII is needed")
    return token


def require_token(address: HttpAddress, token: str, variable: str) -> None:
    """Raise InputError for an address beyond loopback without a token. variable: the token's environment variable."""
    if not token and not address.is_loopback:
        raise InputError(f"listening on {address} needs a token, because anybody can send to it; set {variable}")


# Digests identify all stored bytes and values.
#
# A digest is the lower-case hexadecimal SHA-256 (FIPS 180-4) of bytes. The digest of a value (a spec, a build key, a
# manifest) is that of its canonical JSON: keys sorted, no white space, UTF-8, no NaN (after RFC 8785, whose number
# format equals Python's ``repr`` of a float for the values that occur here).

CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_IN_BYTES = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hexadecimal digits. Digests are checked before they become part of a path."""
    return _DIGEST.fullmatch(text) is not None


Digest = Annotated[str, Predicate(is_digest), doc("a SHA-256 in hexadecimal")]


def check_digest(digest: str) -> str:
    """Return `digest` if it is a digest. Raises InputError."""
    if is_digest(digest):
        return digest
    raise InputError(f"{digest!r} is not a SHA-256 digest; give 64 lower-case hexadecimal digits")


def digests_in(data: bytes) -> Iterator[str]:
    """Each run of exactly 64 hexadecimal digits in a document. Any of them may be a digest."""
    return (raw_digest.decode() for raw_digest in _IN_BYTES.findall(data))


def canonical_json(value: object) -> bytes:
    """Encode a JSON value so that equal values give equal bytes. Raises ValueError on NaN and infinities."""
    return _CANONICAL.encode(value).encode()


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


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
