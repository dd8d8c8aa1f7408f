import os
from pathlib import Path

import pytest

from enginery.core.digest import digest_of_bytes
from enginery.registry.store.blob_digest import Seal
from enginery.registry.store.verification_cache import Stamps

SEAL = Seal(digest_of_bytes(b"data"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were digested."""
    found: list[Path] = []
    holds = Seal.holds
    monkeypatch.setattr(Seal, "holds", lambda self, path: found.append(path) or holds(self, path))
    return found


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, reads: list[Path]) -> None:
    stamps, path = Stamps(tmp_path / "stamps"), tmp_path / "file"
    path.write_bytes(b"data")
    assert stamps.sound(SEAL, path) and stamps.sound(SEAL, path) and len(reads) == 1
    facts = path.stat()
    path.write_bytes(b"dada")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # its time set back: the inode's own tells
    assert not stamps.sound(SEAL, path) and len(reads) == 2
    path.write_bytes(b"data")
    assert stamps.sound(SEAL, path) and len(reads) == 3


def test_several_places_are_remembered_and_damaged_notes_are_none(tmp_path: Path, reads: list[Path]) -> None:
    stamps = Stamps(tmp_path / "stamps")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"data")
        stamps.add(SEAL, tmp_path / name)
    assert stamps.sound(SEAL, tmp_path / "a") and stamps.sound(SEAL, tmp_path / "b") and reads == []
    for damage in (b"[", b'{"a": 1}', b"[1]", b""):
        (tmp_path / "stamps" / SEAL.name).write_bytes(damage)
        assert stamps.sound(SEAL, tmp_path / "a")
    assert len(reads) == 4
    stamps.forget(SEAL)
    assert stamps.last_used(SEAL.name) is None and stamps.sound(SEAL, tmp_path / "a") and len(reads) == 5
