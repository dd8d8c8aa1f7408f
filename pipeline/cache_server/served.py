"""Which keys of a registry a cache serves: those that resolving a reference and pulling an engine read, and no other.

No run, record, lease, build lock, pin, registered spec or history of builds: nobody who pulls needs them. Whoever
reaches a cache may read these of all models, and any blob whose digest is known.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from enginesmith.registry.store.layout import BLOBS, FEEDS, MARKER, MODELS, is_key

Kind = Literal["blob", "document"]
Listing = Literal["keys", "names"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_EVIDENCE = "attestations|latency|signatures"
_VERSION = rf"{MODELS}{_NAME}/versions/{_NAME}/"
_DOCUMENT = re.compile(
    rf"{FEEDS}{_NAME}\.json|"
    rf"{MARKER}|{_VERSION}(manifest\.json|({_EVIDENCE})/.+)|{MODELS}{_NAME}/channels/{_NAME}\.json"
)
_BLOB = re.compile(rf"{BLOBS}([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})")
# The versions and channels of one model, and what lies beside a version; of all models the names alone.
_LISTED = re.compile(rf"{MODELS}{_NAME}/(versions|channels)/|{_VERSION}({_EVIDENCE})/(.+/)?")


@dataclass(frozen=True)
class ServedKeys:
    """also: prefixes whose keys are served and listed beside those (`runs/`)."""

    also: Sequence[str] = ()

    def kind(self, key: str) -> Kind | None:
        """What a key is of; None for one that is not served, or is no key."""
        if _BLOB.fullmatch(key):
            return "blob"
        return "document" if is_key(key) and (_DOCUMENT.fullmatch(key) or self._is_also(key)) else None

    def lists(self, prefix: str, listing: Listing) -> bool:
        """Whether the keys below a prefix are listed, or the names directly below it."""
        if prefix == MODELS:
            return listing == "names"
        whole = prefix.endswith("/") and is_key(prefix[:-1])
        return whole and (_LISTED.fullmatch(prefix) is not None or self._is_also(prefix))

    def _is_also(self, key: str) -> bool:
        return not key.startswith(BLOBS) and any(key.startswith(prefix) for prefix in self.also)
