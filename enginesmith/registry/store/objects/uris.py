"""Reads the URIs of places in buckets, `SCHEME://HOST/PREFIX?option=value`, which never hold credentials."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from enginesmith.core.errors import InputError
from enginesmith.registry.store.layout import is_key


@dataclass(frozen=True)
class BucketUri:
    """The parts of a URI. prefix: '' or 'some/folder'.  where: the URI without its options, for messages."""

    host: str
    prefix: str
    options: Mapping[str, str]
    where: str


def read_uri(text: str, options: Collection[str]) -> BucketUri:
    """Read a URI with some of these options. Raises InputError, which never repeats what may be a secret."""
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.fragment:
        raise InputError(
            f"registry {parts.scheme}://...: a bucket's URI is {parts.scheme}://bucket/prefix?option=value, without "
            "user or password; give credentials in the usual ways of its cloud (environment, profile, role)"
        )
    prefix = parts.path.strip("/")
    where = f"registry {parts.scheme}://{parts.netloc}/{prefix}"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    found = dict(pairs)
    if unknown := sorted(set(found) - set(options)):
        raise InputError(f"{where}: option {unknown[0][:40]!r} is not known; there are {', '.join(options)}")
    if len(found) < len(pairs) or not all(found.values()):
        raise InputError(f"{where}: an option is given twice or without a value")
    return BucketUri(parts.netloc, prefix, found, where)


def check_bucket(found: BucketUri, name: str, pattern: re.Pattern[str], words: str, kind: str = "bucket") -> None:
    """Raise InputError unless `name` can be a bucket's, and the prefix a key. words: what a name is, for messages."""
    if not pattern.fullmatch(name):
        raise InputError(f"{found.where}: {name!r} is not the name of a {kind} ({words})")
    if found.prefix and not is_key(found.prefix):
        raise InputError(
            f"{found.where}: the parts of the prefix must be letters, digits and . _ -, not starting with . _ -"
        )


def check_endpoint(text: str, kind: str) -> str:
    """The URL of a server, without a slash at its end. Raises InputError for what is none, or has credentials."""
    parts = urlsplit(text)
    if "@" in text or parts.query or parts.fragment:
        raise InputError(f"the {kind} endpoint must be a plain URL, without user, password or query")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"the {kind} endpoint {text!r} is not a URL; write it as https://host:port")
    return text.rstrip("/")
