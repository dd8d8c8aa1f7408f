from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from enginesmith.client.pull import BlobFetcher, Pulled
from enginesmith.core.errors import InputError, IntegrityError, digest_of_bytes
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.names import Reference, parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.cache import BlobCache
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import blob_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions.publish import publish
from tests.enginesmith.registries import approval, draft, engine, flip, names_in, on_each_kind, overwrite, pull

HONEST, EVIL = b"honest engine", b"evil.. engine"
NAME, OTHER = digest_of_bytes(HONEST), blake3(EVIL).hexdigest()
BLOB = BlobDigest(NAME, blake3(HONEST).hexdigest())


def published(store: Store, blake3: str | None = BLOB.blake3) -> Manifest:
    """A version whose engine is HONEST, with what its manifest says of that."""
    entry = engine(store, data=HONEST)
    return publish(store, draft(store).with_blake3({NAME: blake3}), [(entry, approval(entry))]).manifest


class Far:
    """A registry in a folder that counts as one elsewhere, so that caches are used. ranges: that were asked for."""

    near = False

    def __init__(self, store: Store) -> None:
        self.store, self.ranges = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def open_range(self, digest: str, offset: int, size: int) -> Any:
        self.ranges += 1
        return self.store.open_range(digest, offset, size)


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "cache")


@pytest.fixture
def honest(store: Store) -> Far:
    published(store)
    return Far(store)


@pytest.fixture
def evil(tmp_path: Path) -> Far:
    """A registry whose manifest says, of the name of HONEST, the BLAKE3 of EVIL, and that holds EVIL there."""
    store = open_store(tmp_path / "evil", create=True)
    published(store, OTHER)
    overwrite(store, blob_key(NAME), EVIL)
    return Far(store)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithms of the hashers that were made."""
    items: list[str] = []
    hasher = BlobDigest.hasher
    monkeypatch.setattr(BlobDigest, "hasher", lambda self: items.append(self.algorithm) or hasher(self))
    return items


def pulled(store: Any, dest: Path, cache: BlobCache | None) -> Pulled:
    return pull(store, Reference("digits"), CPU, dest, fetcher=BlobFetcher(cache))


def refuse(*_: object) -> Any:
    raise AssertionError("it was downloaded")


@on_each_kind
@pytest.mark.parametrize("cached", [True, False])
def test_a_pull_is_verified_by_the_blake3_of_its_manifest(store, tmp_path, cache, cached, hashed):
    published(store)
    hashed.clear()  # of what was uploaded
    fetcher = cache if cached else None
    assert pulled(store, tmp_path / "out", fetcher).path.read_bytes() == HONEST and set(hashed) == {"BLAKE3"}
    assert pulled(store, tmp_path / "out", fetcher).cached
    flip(store, NAME)
    with pytest.raises(IntegrityError, match=rf"{NAME}.*BLAKE3.*{BLOB.blake3}.*--repair"):
        pulled(store, tmp_path / "other", BlobCache(tmp_path / "fresh") if cached else None)
    assert names_in(tmp_path / "other") == [] and set(hashed) == {"BLAKE3"}


def test_without_blake3_in_the_manifest_sha256_verifies(store, tmp_path, cache, hashed):
    published(store, None)
    pulled(Far(store), tmp_path / "old", cache)
    assert set(hashed) == {"SHA-256"} and names_in(cache.folder / "blobs") == [NAME]


@pytest.mark.parametrize("says", [BLOB.blake3, None])
@pytest.mark.parametrize("place", ["its own", "the same"])
def test_a_manifest_with_a_wrong_digest_pair_does_not_affect_others(store, evil, tmp_path, cache, says, place):
    """Who pulls from the evil registry gets what it serves; those bytes never come to others under the honest name."""
    published(store, says)
    out_path = tmp_path / "out"
    assert pulled(evil, out_path if place == "the same" else tmp_path / "elsewhere", cache).path.read_bytes() == EVIL
    assert not cache.holds(NAME)
    result = pulled(Far(store), out_path, cache)
    assert result.path.read_bytes() == HONEST and result.origin == "registry"
    assert pulled(Far(store), out_path, cache).cached
    with cache.hold(NAME, lambda sink: sink.write(HONEST) and NAME) as cached_blob:
        assert cached_blob.read_bytes() == HONEST


def test_wrong_bytes_never_become_the_named_blob(evil: Far, tmp_path: Path, cache: BlobCache) -> None:
    pulled(evil, tmp_path / "evil", cache)
    requests: list[str] = []
    with cache.hold(NAME, lambda sink: requests.append("asked") or (sink.write(HONEST) and NAME)) as cached_blob:
        assert cached_blob.read_bytes() == HONEST and requests == ["asked"]
    with cache.hold_verified(BlobDigest(NAME), refuse) as (path, _):
        assert path.read_bytes() == HONEST


def test_a_blob_read_by_blake3_counts_after_its_sha256_is_checked(honest, tmp_path, cache):
    pulled(honest, tmp_path / "a", cache)
    assert names_in(cache.folder / "blobs") == [BLOB.name] and not cache.holds(NAME)
    with cache.hold(NAME, refuse) as cached_blob:
        assert cached_blob.read_bytes() == HONEST
    assert names_in(cache.folder / "blobs") == [NAME]
    assert pulled(honest, tmp_path / "b", cache).origin == "cache" and honest.ranges == 1
    assert pulled(honest, tmp_path / "b", cache).cached, "what the SHA-256 verified needs no BLAKE3"


def test_a_damaged_file_with_the_name_is_downloaded_again(honest: Far, tmp_path: Path, cache: BlobCache) -> None:
    with cache.hold(NAME, lambda sink: sink.write(HONEST) and NAME) as cached_blob:
        path = cached_blob
    path.chmod(0o644)
    path.write_bytes(EVIL)
    assert pulled(honest, tmp_path / "out", cache).path.read_bytes() == HONEST
    assert names_in(cache.folder / "blobs") == [BLOB.name]


def test_a_blake3_record_is_valid_for_its_pair_only(tmp_path: Path, cache: BlobCache) -> None:
    (tmp_path / "file").write_bytes(EVIL)
    lie = replace(BLOB, blake3=OTHER)
    cache.verifications.add(lie, tmp_path / "file")
    assert cache.verifications.is_verified(lie, tmp_path / "file")
    assert not cache.verifications.is_verified(BLOB, tmp_path / "file") and not cache.verifications.is_verified(
        BlobDigest(NAME), tmp_path / "file"
    )
    cache.verifications.forget(lie)
    assert names_in(cache.folder / "stamps") == []


@on_each_kind
def test_verify_names_a_manifest_with_a_wrong_digest(store: Store) -> None:
    published(store, OTHER)
    (problem,) = verify(store).problems
    assert (problem.kind, problem.what, problem.fault) == ("blake3", "digits@1", True)
    assert all(digest in problem.detail for digest in (NAME, OTHER, str(BLOB.blake3)))
    assert [result.kind for result in verify(store, parse_reference("digits@1")).problems] == ["blake3"]


def test_a_mirror_keeps_the_blake3(store: Store, tmp_path: Path, hashed: list[str]) -> None:
    manifest, other_store = published(store), open_store(tmp_path / "mirror", create=True)
    mirror(store, [parse_reference("digits@1")], other_store)
    assert other_store.read(manifest_key("digits", "1")) == manifest.to_bytes() and verify(other_store).problems == ()
    hashed.clear()
    assert pull(other_store, parse_reference("digits@1"), CPU, tmp_path / "out").path.read_bytes() == HONEST
    assert set(hashed) == {"BLAKE3"}


@pytest.mark.parametrize("make", [lambda bad: BlobDigest(bad), lambda bad: BlobDigest(NAME, bad)])
@pytest.mark.parametrize("bad", ["", "../x", "A" * 64, "0" * 63, f"{NAME}/x"])
def test_an_invalid_digest_never_becomes_a_file_name(make: Callable[[str], BlobDigest], bad: str) -> None:
    with pytest.raises(InputError, match="is not a SHA-256 digest"):
        make(bad)
