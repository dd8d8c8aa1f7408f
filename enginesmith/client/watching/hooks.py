"""Hooks that run after a swap, within a time limit: a command, or a POST to a URL.

Both get the same facts: a command in environment variables (ENGINESMITH_MODEL, ENGINESMITH_VERSION,
ENGINESMITH_CHANNEL, ENGINESMITH_DIGEST, ENGINESMITH_FOLDER, ENGINESMITH_ENGINE, ENGINESMITH_DESCRIPTION,
ENGINESMITH_CURRENT, ENGINESMITH_PREVIOUS), a URL in a JSON object with the same names in lower case without the prefix.
Success is exit code 0, or any 2xx answer.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from enginesmith.core.commands import run_command
from enginesmith.core.errors import InputError

TIMEOUT_S = 30.0


# Called with the facts of a swap; returns the reason of its failure, or None.
Hook = Callable[[Mapping[str, str]], str | None]


@dataclass(frozen=True)
class Command:
    """A command line, split as a shell would and run without one; its output goes to stderr."""

    line: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not shlex.split(self.line):
            raise InputError("the hook's command is empty; give a command line")

    def __call__(self, facts: Mapping[str, str]) -> str | None:
        """Run the command, with all that it started killed at the time limit; return why it failed, or None."""
        environment = {**os.environ, **{f"ENGINESMITH_{name.upper()}": value for name, value in facts.items()}}
        try:
            code = run_command(shlex.split(self.line), self.timeout_s, environment=environment, stdout=2).returncode
        except OSError as error:
            return f"hook {self.line!r} cannot be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"hook {self.line!r} took over {self.timeout_s:g} s and was killed"
        return f"hook {self.line!r} ended with {code}" if code else None


@dataclass(frozen=True)
class Post:
    """A URL to post to. Raises InputError for one that is not http or https."""

    url: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"hook URL: scheme {urlsplit(self.url).scheme!r} is not http or https")

    def __call__(self, facts: Mapping[str, str]) -> str | None:
        """Post the facts as JSON; return why that failed, or None."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        asked = Request(self.url, json.dumps(facts).encode(), {"Content-Type": "application/json"})  # noqa: S310 - checked
        try:
            with urlopen(asked, timeout=self.timeout_s):  # noqa: S310 - the scheme was checked
                return None
        except HTTPError as error:
            error.close()
            return f"{self._name()} answers {error.code}"
        except (OSError, HTTPException, ValueError) as error:  # ValueError: it leads to what is no URL
            return f"{self._name()} does not answer: {getattr(error, 'reason', None) or type(error).__name__}"

    def _name(self) -> str:
        """The URL without user, password and query, which may be secret."""
        parts = urlsplit(self.url)
        return f"hook {parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
