import os
from pathlib import Path

import pytest

from enginesmith.core.errors import digest_of_bytes
from enginesmith.registry.store.cache import VerificationCache
from enginesmith.registry.store.files import BlobDigest

BLOB = BlobDigest(digest_of_bytes(b"data"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were digested."""
    items: list[Path] = []
    holds = BlobDigest.matches
    monkeypatch.setattr(BlobDigest, "matches", lambda self, path: items.append(path) or holds(self, path))
    return items


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, reads: list[Path]) -> None:
    verifications, path = VerificationCache(tmp_path / "stamps"), tmp_path / "file"
    path.write_bytes(b"data")
    assert verifications.is_verified(BLOB, path) and verifications.is_verified(BLOB, path) and len(reads) == 1
    facts = path.stat()
    path.write_bytes(b"dada")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # its time set back: the inode's own tells
    assert not verifications.is_verified(BLOB, path) and len(reads) == 2
    path.write_bytes(b"data")
    assert verifications.is_verified(BLOB, path) and len(reads) == 3


def test_several_locations_are_cached_and_damaged_entries_are_ignored(tmp_path: Path, reads: list[Path]) -> None:
    verifications = VerificationCache(tmp_path / "stamps")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"data")
        verifications.add(BLOB, tmp_path / name)
        assert verifications.is_verified(BLOB, tmp_path / name)
    assert reads == []
    for damage in (b"[", b'{"a": 1}', b"[1]", b""):
        (tmp_path / "stamps" / BLOB.name).write_bytes(damage)
        assert verifications.is_verified(BLOB, tmp_path / "a")
    assert len(reads) == 4
    verifications.forget(BLOB)
    assert verifications.last_used(BLOB.name) is None
    assert verifications.is_verified(BLOB, tmp_path / "a") and len(reads) == 5
