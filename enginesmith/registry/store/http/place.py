"""The place of a registry behind HTTP: an `http(s)://host:port/prefix` URI as a value."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from enginesmith.core.errors import InputError
from enginesmith.registry.store.layout import is_key

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HttpLocation:
    """A server and where the registry is on it. prefix: '' or 'some/folder', without a slash at its ends."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def uri(self) -> str:
        """The URI that `parse_location` reads."""
        return self.locator("").removesuffix("/")

    @property
    def site(self) -> str:
        """'http://host:port'."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    def locator(self, key: str) -> str:
        """The URL of a key."""
        return f"{self.site}{self.path(key)}"

    def path(self, key: str) -> str:
        """The path of a key in requests: '/prefix/KEY'."""
        return f"/{self.prefix}/{key}" if self.prefix else f"/{key}"


def parse_location(text: str) -> HttpLocation:
    """Read an http:// or https:// URI. Raises InputError, which never repeats what may be a secret."""
    scheme, _, rest = text.partition("://")
    if "@" in rest or "?" in rest or "#" in rest:
        raise InputError(
            f"registry {scheme[:20]}://...: a cache's URI is http://host:port/prefix, without user, password, query "
            "or fragment; a token comes from the file that ENGINESMITH_CACHE_TOKEN_FILE names"
        )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InputError(f"registry {text[:200]!r} is not a URI ({error}); give http://host:port/prefix") from error
    prefix = parts.path.strip("/")
    if not parts.hostname or not parts.hostname.isascii():
        raise InputError(f"registry {text[:200]!r} names no host; give http://host:port/prefix")
    if prefix and not is_key(prefix):
        raise InputError(
            f"registry {text[:200]!r}: the parts of the prefix must be letters, digits and . _ -, and not start with "
            "these signs"
        )
    return HttpLocation(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], prefix)
