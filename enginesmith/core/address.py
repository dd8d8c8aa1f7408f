"""Where a server listens, and what it wants to be shown."""

import os
from dataclasses import dataclass
from ipaddress import ip_address

from enginesmith.core.errors import InputError


@dataclass(frozen=True)
class HttpAddress:
    """Where to listen. port: 0 is any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str, default_host: str = "") -> HttpAddress:
    """The address in '127.0.0.1:8080', '[::]:8080'; in ':8080' with the default host, if there is one.

    Raises InputError.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or default_host
    if not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise InputError(f"{text[:80]!r} is no address to listen on; give HOST:PORT, as in 127.0.0.1:8900")
    return HttpAddress(host, int(port))


def read_token(variable: str) -> str:
    """The token in a variable of the environment, without the blanks around it; '' for none.

    Raises InputError for what no header can hold.
    """
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise InputError(f"{variable} holds no token: one line of ASCII is needed")
    return token


def require_token(address: HttpAddress, token: str, variable: str) -> None:
    """Raise InputError for an address beyond loopback without a token. variable: where the token is read."""
    if not token and not address.is_loopback:
        raise InputError(f"listening on {address} needs a token, for anybody may send there: set {variable}")
