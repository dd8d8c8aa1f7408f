"""Whether what a watcher serves is still trusted, asked at every look: keys are revoked while channels stand still.

What is served is never taken away: the server has it open, and a key is not the only reason for a refusal. It is said,
and a file beside `current` says so too, as long as it lasts: a readiness probe can look for it.
"""

import os
from contextlib import suppress
from pathlib import Path

from enginery.core import parsing
from enginery.core.errors import InputError, IntegrityError
from enginery.core.names import Reference
from enginery.registry.store.atomic_write import reachable, write_whole
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.trust.policy import VARIABLE, TrustPolicy
from enginery.registry.trust.requirement import UntrustedError
from enginery.registry.versions import lookup
from enginery.registry.versions.lookup import Located

MARK = "distrusted"
_MAX_BYTES = 4 << 20


class TrustRecheck:
    """Rechecks the trust policy for the version that the link `current` points to. trust: as in `resolve.Policy`; a
    file is read at every check."""

    def __init__(self, current: Path, trust: TrustPolicy | Path | str | None) -> None:
        self._current, self._trust = current, trust
        self._mark = current.parent / MARK
        self._known: tuple[str, Located] | None = None

    def ask(self, store: Store) -> None:
        """Ask the trust policy about what is served, and leave or take away the mark.

        Raises UntrustedError when it is trusted no longer, or by a policy that cannot be read; UnknownNameError and
        UnavailableError, which change nothing, when that cannot be told.
        """
        if self._trust is None and not os.environ.get(VARIABLE):
            self._say(None)
        elif (located := self._find_served(store)) is not None:
            try:
                require(store, located.manifest, self._trust)
            except (UntrustedError, InputError) as error:
                reason = f"TRUSTED NO LONGER, and still served: {error}"
                self._say(reason)
                raise UntrustedError(f"{reason}\n{self._mark} stays there until that changes") from error
            self._say(None)

    def _find_served(self, store: Store) -> Located | None:
        """The version that is served, as the registry has it; None where nothing is. Read once a version."""
        try:
            folder = os.readlink(self._current)  # noqa: PTH115 - the text, as it was written
        except OSError:
            return None
        if self._known is None or self._known[0] != folder:
            self._known = folder, self._read(store)
        return self._known[1]

    def _read(self, store: Store) -> Located:
        with reachable(f"reading {self._current}"):
            descriptions = sorted(self._current.glob("*.json"))
            data = descriptions[0].read_bytes() if descriptions else b""
        try:
            description = parsing.parse_json(data, _MAX_BYTES)
            model, version = (parsing.field(description, name, parsing.name) for name in ("model", "version"))
            digest = parsing.field(description, "manifest", parsing.digest)
        except IntegrityError as error:
            raise IntegrityError(
                f"{self._current} has no description that can be read ({error}), so nobody knows what is served; "
                "delete the link, and it is made anew"
            ) from error
        manifest = lookup.load(store, model, version)
        if manifest.digest != digest:
            raise IntegrityError(
                f"{self._current} leads to {model}@{version} with manifest {digest}, and that is now "
                f"{manifest.digest}: it was replaced by hand; run `enginery verify`"
            )
        return Located(Reference(model, version), manifest)

    def _say(self, reason: str | None) -> None:
        """Write the mark, or take it away."""
        before = None
        with suppress(OSError):
            before = self._mark.read_bytes()
        wanted = None if reason is None else f"{reason}\n".encode()
        if wanted != before:
            with reachable(f"writing {self._mark}"):
                write_whole(self._mark, wanted) if wanted is not None else self._mark.unlink(missing_ok=True)
