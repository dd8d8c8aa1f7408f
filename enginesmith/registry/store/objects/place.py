"""Places in buckets, and their URIs."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from enginesmith.core.errors import InputError
from enginesmith.registry.store.layout import is_key


class BucketPlace:
    """Where a registry is: a bucket, a prefix ('' or 'some/folder'), and how to reach it. Frozen, without credentials.

    endpoint: URL of another server than the cloud's.  attempts: requests before giving up; None: `api.ATTEMPTS`.
    """

    prefix: str
    endpoint: str | None = None
    attempts: int | None = None

    @property
    def root(self) -> str:
        """Where the bucket is, as other tools write it: 's3://bucket'."""
        raise NotImplementedError

    @property
    def options(self) -> Mapping[str, str]:
        """The options of the URI."""
        return {"endpoint": self.endpoint} if self.endpoint else {}

    @property
    def uri(self) -> str:
        """The URI that opens it, everywhere with the same result."""
        return self.locator("") + (f"?{urlencode(self.options, safe=':/')}" if self.options else "")

    def locator(self, key: str) -> str:
        """Where a key is, as other tools write it: 's3://bucket/prefix/key'."""
        return "/".join(part for part in (self.root, self.prefix, key) if part)

    def key(self, key: str) -> str:
        """The key's name in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


@dataclass(frozen=True)
class BucketUri:
    """The parts of a URI. prefix: '' or 'some/folder'.  where: the URI without its options, for messages."""

    host: str
    prefix: str
    options: Mapping[str, str]
    where: str


def read_uri(text: str, options: Collection[str]) -> BucketUri:
    """Read a URI with some of these options. Raises InputError, which never repeats what may be a secret."""
    url = urlsplit(text)
    if "@" in url.netloc or url.fragment:
        raise InputError(
            f"registry {url.scheme}://...: a bucket's URI is {url.scheme}://bucket/prefix?option=value, without "
            "user or password; give credentials in the usual ways of its cloud (environment, profile, role)"
        )
    prefix = url.path.strip("/")
    registry_name = f"registry {url.scheme}://{url.netloc}/{prefix}"
    pairs = parse_qsl(url.query, keep_blank_values=True)
    option_values = dict(pairs)
    if unknown_options := sorted(set(option_values) - set(options)):
        raise InputError(
            f"{registry_name}: option {unknown_options[0][:40]!r} is not known; there are {', '.join(options)}"
        )
    if len(option_values) < len(pairs) or not all(option_values.values()):
        raise InputError(f"{registry_name}: an option is given twice or without a value")
    return BucketUri(url.netloc, prefix, option_values, registry_name)


def check_bucket(uri: BucketUri, name: str, pattern: re.Pattern[str], words: str, kind: str = "bucket") -> None:
    """Raise InputError unless `name` can be a bucket's, and the prefix a key. words: what a name is, for messages."""
    if not pattern.fullmatch(name):
        raise InputError(f"{uri.where}: {name!r} is not the name of a {kind} ({words})")
    if uri.prefix and not is_key(uri.prefix):
        raise InputError(
            f"{uri.where}: the parts of the prefix must be letters, digits and . _ -, not starting with . _ -"
        )


def check_endpoint(text: str, kind: str) -> str:
    """The URL of a server, without a slash at its end. Raises InputError for what is none, or has credentials."""
    url = urlsplit(text)
    if "@" in text or url.query or url.fragment:
        raise InputError(f"the {kind} endpoint must be a plain URL, without user, password or query")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"the {kind} endpoint {text!r} is not a URL; write it as https://host:port")
    return text.rstrip("/")
