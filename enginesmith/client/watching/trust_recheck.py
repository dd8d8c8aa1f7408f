"""Checks again, at every look, whether the version that is served is trusted: keys are revoked while channels stay.

The signatures are those of the snapshot that the version was resolved by, so that a check sends no request: a key that
is revoked is taken out of the policy, which is read at every check, and a new signature comes with a new snapshot.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginesmith.client.layouts.base import Place
from enginesmith.core.codec import Excerpt, parse_as
from enginesmith.core.digest import Digest
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.names import Name
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.files import reachable, write_whole
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import VARIABLE, TrustPolicy
from enginesmith.registry.trust.requirement import UntrustedError
from enginesmith.registry.versions import lookup

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class _Served(Excerpt):
    """What a description says of the version. manifest: digest of its manifest."""

    model: Name
    version: Name
    manifest: Digest


class TrustRecheck:
    """Rechecks the trust policy for the version that is served at a place. trust: as in `resolve.Policy`; a file is
    read at every check."""

    def __init__(self, place: Place, trust: TrustPolicy | Path | str | None) -> None:
        self._place, self._trust = place, trust
        self._known: tuple[str, Manifest, Documents | None] | None = None

    def note_served(self, served: str, manifest: Manifest, documents: Documents | None) -> None:
        """Note the version that is served by this name, and the documents that it was resolved by; None: those of the
        registry."""
        self._known = served, manifest, documents

    def check(self, store: Store | None) -> None:
        """Check the version that is served against the trust policy, and write or delete the mark accordingly.

        store: None while the registry is out of reach: what this process has resolved is checked all the same. Raises
        UntrustedError when it is trusted no longer, or by a policy that cannot be read; UnknownNameError and
        UnavailableError, which change nothing, when the version cannot be read.
        """
        folder = self._place.served()
        if self._trust is None and not os.environ.get(VARIABLE):
            self._write_mark(None)
        elif folder:
            if self._known is None or self._known[0] != folder:
                if store is None:
                    return
                self._known = folder, self._read_served(store), None
            if (documents := self._known[2] or store) is None:
                return
            try:
                require(documents, self._known[1], self._trust)
            except (UntrustedError, InputError) as error:
                reason = f"TRUSTED NO LONGER, and still served: {error}"
                self._write_mark(f"{reason}\n".encode())
                raise UntrustedError(f"{reason}\n{self._place.mark} stays there until that changes") from error
            self._write_mark(None)

    def _read_served(self, store: Store) -> Manifest:
        """The manifest, from the registry, of the version that the description of what is served names."""
        place = self._place.lock.parent
        with reachable(f"reading {place}"):
            path = self._place.description()
            data = path.read_bytes() if path else b""
        try:
            served = parse_as(data, _MAX_BYTES, _Served)
        except IntegrityError as error:
            raise IntegrityError(
                f"{place} has no description that can be read ({error}), so nobody knows what is served; delete "
                f"{self._place.served()} there, and it is made anew"
            ) from error
        manifest = lookup.load(store, served.model, served.version)
        if manifest.digest != served.manifest:
            raise IntegrityError(
                f"{path} is of {served.model}@{served.version} with manifest {served.manifest}, and that is now "
                f"{manifest.digest}: it was replaced by hand; run `enginesmith registry fsck`"
            )
        return manifest

    def _write_mark(self, content: bytes | None) -> None:
        """Write the mark with this content, or delete it (None); nothing is written where it is so already."""
        before, mark = None, self._place.mark
        with suppress(OSError):
            before = mark.read_bytes()
        if content != before:
            with reachable(f"writing {mark}"):
                write_whole(mark, content) if content is not None else mark.unlink(missing_ok=True)
