"""Which keys a cache serves and lists, and which it does not, whatever is written for a key."""

import pytest

from enginesmith.registry.store import layout
from pipeline.cache_server.served import ServedKeys

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (layout.MARKER, "document"),
        (layout.blob_key(DIGEST), "blob"),
        (layout.manifest_key("digits", "1"), "document"),
        (layout.channel_key("digits", "stable"), "document"),
        (layout.attestation_key("digits", "1", DIGEST, DIGEST), "document"),
        (layout.latency_key("digits", "1", DIGEST, DIGEST), "document"),
        (layout.signature_key("digits", "1", DIGEST, DIGEST), "document"),
        (layout.record_key("export", DIGEST), None),
        (layout.lease_key("a"), None),
        (layout.run_key("a"), None),
        (layout.pin_key("digits", "1"), None),
        (layout.registered_key("digits"), None),
        (layout.MARKS, None),
        (layout.page_key("digits", "1"), None),
        (f"blobs/sha256/cd/{DIGEST}", None),
        (f"blobs/sha256/ab/{DIGEST}/x", None),
        (f"blobs/sha256/ab/{DIGEST.upper()}", None),
        ("models/../leases/a.json", None),
        ("models/digits/versions/1/attestations/../../../../leases/a.json", None),
        ("models/digits/channels/stable.json/", None),
        ("models/digits//channels/stable.json", None),
        ("models/digits/channels/stable.json\n", None),
        ("", None),
        ("/etc/passwd", None),
    ],
)
def test_only_what_pulling_reads_is_served(key: str, kind: str | None) -> None:
    assert ServedKeys().kind(key) == kind


@pytest.mark.parametrize(
    ("prefix", "listing", "listed"),
    [
        ("models/", "names", True),
        ("models/", "keys", False),
        ("models/digits/versions/", "keys", True),
        ("models/digits/channels/", "names", True),
        (layout.evidence_prefix("attestations", "digits", "1"), "keys", True),
        (f"{layout.evidence_prefix('signatures', 'digits', '1')}{DIGEST}/", "names", True),
        ("models/digits/", "keys", False),
        ("models/digits/versions", "keys", False),
        ("blobs/sha256/", "names", False),
        ("models/../", "names", False),
        ("leases/", "names", False),
        ("", "names", False),
    ],
)
def test_only_what_resolving_needs_is_listed(prefix: str, listing: str, listed: bool) -> None:
    assert ServedKeys().lists(prefix, listing) is listed  # type: ignore[arg-type]


def test_more_is_served_by_prefix_and_blobs_are_never_listed() -> None:
    served = ServedKeys(("runs/", ""))
    assert served.kind("runs/a.json") == "document" and served.lists("runs/", "keys")
    assert served.kind("runs/../leases/a") is None and not served.lists("blobs/sha256/ab/", "keys")
