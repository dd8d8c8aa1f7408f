from collections.abc import Iterator

import pytest

from enginesmith.registry.collection import references
from enginesmith.registry.collection.references import keys_below, stored_blobs
from tests.enginesmith.registry.memory import MemoryStore


class Pages(MemoryStore):
    """A remote store: each listing is remembered."""

    def __init__(self) -> None:
        super().__init__(near=False)
        self.listed: list[str] = []

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.listed.append(prefix)
        return super().sizes(prefix)


def test_a_page_is_one_request_and_more_keys_cost_one_per_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Pages()
    digests = {store.put_bytes(f"{number}".encode()): len(f"{number}") for number in range(40)}
    assert stored_blobs(store) == digests and store.listed == ["blobs/sha256/"]
    monkeypatch.setattr(references, "_PAGE", 10)
    store.listed.clear()
    assert stored_blobs(store) == digests
    assert sorted(store.listed[1:]) == sorted({f"blobs/sha256/{digest[:2]}/" for digest in digests})


def test_keys_beside_folders_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Pages()
    keys = ["models/strange.json", *(f"models/a/{number}.json" for number in range(9))]
    for key in keys:
        store.create(key, b"{}")
    monkeypatch.setattr(references, "_PAGE", 5)
    assert sorted(keys_below(store, "models/")) == sorted(keys)


def test_other_files_than_blobs_are_not_counted() -> None:
    store = MemoryStore({"blobs/sha256/ab/other": b"", f"blobs/sha256/cd/{'ab' * 32}": b""})
    assert stored_blobs(store) == {}
