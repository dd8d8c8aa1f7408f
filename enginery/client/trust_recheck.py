"""Checks again, at every look, whether the version that is served is trusted: keys are revoked while channels stay.

The signatures are those of the snapshot that the version was resolved by, so that a check sends no request: a key that
is revoked is taken out of the policy, which is read at every check, and a new signature comes with a new snapshot.
"""

import os
from contextlib import suppress
from pathlib import Path

from enginery.core import parsing
from enginery.core.errors import InputError, IntegrityError
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Documents, Store
from enginery.registry.store.files import reachable, write_whole
from enginery.registry.trust import require
from enginery.registry.trust.policy import VARIABLE, TrustPolicy
from enginery.registry.trust.requirement import UntrustedError
from enginery.registry.versions import lookup

# The file beside `current` that says why what is served is trusted no longer.
MARK = "distrusted"
_MAX_BYTES = 4 << 20


class TrustRecheck:
    """Rechecks the trust policy for the version that the link `current` points to. trust: as in `resolve.Policy`; a
    file is read at every check."""

    def __init__(self, current: Path, trust: TrustPolicy | Path | str | None) -> None:
        self._current, self._trust = current, trust
        self._mark = current.parent / MARK
        self._known: tuple[str, Manifest, Documents | None] | None = None

    def note_served(self, folder: str, manifest: Manifest, documents: Documents | None) -> None:
        """Note the version in a folder and the documents that it was resolved by; None: those of the registry."""
        self._known = folder, manifest, documents

    def check(self, store: Store) -> None:
        """Check the version that is served against the trust policy, and write or delete the mark accordingly.

        Raises UntrustedError when it is trusted no longer, or by a policy that cannot be read; UnknownNameError and
        UnavailableError, which change nothing, when the version cannot be read.
        """
        folder = read_link(self._current)
        if self._trust is None and not os.environ.get(VARIABLE):
            self._write_mark(None)
        elif folder:
            if self._known is None or self._known[0] != folder:
                self._known = folder, self._read_served(store), None
            try:
                require(self._known[2] or store, self._known[1], self._trust)
            except (UntrustedError, InputError) as error:
                reason = f"TRUSTED NO LONGER, and still served: {error}"
                self._write_mark(f"{reason}\n".encode())
                raise UntrustedError(f"{reason}\n{self._mark} stays there until that changes") from error
            self._write_mark(None)

    def _read_served(self, store: Store) -> Manifest:
        """The manifest, from the registry, of the version that the description behind `current` names."""
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
        return manifest

    def _write_mark(self, content: bytes | None) -> None:
        """Write the mark with this content, or delete it (None); nothing is written where it is so already."""
        before = None
        with suppress(OSError):
            before = self._mark.read_bytes()
        if content != before:
            with reachable(f"writing {self._mark}"):
                write_whole(self._mark, content) if content is not None else self._mark.unlink(missing_ok=True)


def read_link(link: Path) -> str:
    """Where a link points, as it was written; '' where there is none."""
    with suppress(OSError):
        return os.readlink(link)  # noqa: PTH115
    return ""
