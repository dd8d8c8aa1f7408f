"""Whether a server is well after a swap, by a command or a URL of its own, and how many requests it says it answered.

Well is exit code 0, or a 2xx answer. What the command prints or the URL answers may be a JSON object with `requests`
and `errors`, whole numbers counted since the swap; anything else is ignored.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from enginesmith.core import parsing
from enginesmith.core.commands import run_command
from enginesmith.core.errors import InputError

TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class HealthAnswer:
    """failure: why the server is not well, '' if it is.  requests, errors: that it counted, None where it says none."""

    failure: str = ""
    requests: int | None = None
    errors: int | None = None


# Called with the facts of a swap.
Health = Callable[[Mapping[str, str]], HealthAnswer]


@dataclass(frozen=True)
class HealthCommand:
    """A command line, split as a shell would and run without one, with the variables that hooks get."""

    line: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not shlex.split(self.line):
            raise InputError("the health command is empty; give a command line")

    def __call__(self, facts: Mapping[str, str]) -> HealthAnswer:
        """Run the command, with all that it started killed at the time limit."""
        environment = {**os.environ, **{f"ENGINESMITH_{name.upper()}": value for name, value in facts.items()}}
        try:
            done = run_command(shlex.split(self.line), self.timeout_s, environment=environment)
        except subprocess.TimeoutExpired:
            return HealthAnswer(f"health command took over {self.timeout_s:g} s and was killed")
        except OSError as error:
            return HealthAnswer(f"health command cannot be started: {error.strerror}")
        return _counts(done.stdout, f"health command ended with {done.returncode}" if done.returncode else "")


@dataclass(frozen=True)
class HealthUrl:
    """A URL to get. Raises InputError for one that is not http or https."""

    url: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"health URL: scheme {urlsplit(self.url).scheme!r} is not http or https")

    def __call__(self, facts: Mapping[str, str]) -> HealthAnswer:  # noqa: ARG002 - a `Health`
        """Get the URL."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import urlopen

        try:
            with urlopen(self.url, timeout=self.timeout_s) as answer:  # noqa: S310 - the scheme was checked
                return _counts(answer.read(_MOST_BYTES), "")
        except HTTPError as error:
            failure = f"health URL answers {error.code}"
            with error, suppress(OSError, HTTPException, ValueError):
                return _counts(error.read(_MOST_BYTES), failure)
            return HealthAnswer(failure)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: it leads to what is no URL
            return HealthAnswer(f"health URL does not answer: {getattr(error, 'reason', None) or type(error).__name__}")


def _counts(data: bytes, failure: str) -> HealthAnswer:
    found: object = None
    with suppress(ValueError, RecursionError):
        found = parsing.load_json(data[:_MOST_BYTES])
    counts = [found.get(name) if isinstance(found, dict) else None for name in ("requests", "errors")]
    if all(type(count) is int and 0 <= count < 1 << 53 for count in counts):
        return HealthAnswer(failure, counts[0], counts[1])
    return HealthAnswer(failure)
