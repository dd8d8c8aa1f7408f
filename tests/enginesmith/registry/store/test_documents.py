"""A document with several writers loses nothing that one of them wrote."""

import pytest

from enginesmith.core.errors import ConflictError, UndecidedError
from enginesmith.registry.store import base
from enginesmith.registry.store.base import Store, change
from tests.enginesmith.registries import on_each_kind

KEY = "history/x.json"


@on_each_kind
def test_the_slower_download_continues_from_the_existing_bytes(store: Store) -> None:
    seen: list[bytes | None] = []

    def add(data: bytes | None) -> bytes:
        if not seen:
            store.create(KEY, b"other,")  # another writer, in between
        seen.append(data)
        return (data or b"") + b"mine,"

    assert change(store, KEY, add) == b"other,mine," == store.read(KEY)
    assert seen == [None, b"other,"]


def test_nothing_is_written_where_nothing_changes(store: Store) -> None:
    assert change(store, KEY, lambda _: None) is None and store.read(KEY) is None
    store.create(KEY, b"x")
    assert change(store, KEY, lambda data: data) == b"x"


def test_a_document_that_never_stands_still_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_LOSERS_PAUSE_S", 0)
    monkeypatch.setattr(type(store), "replace", lambda *_: False)
    with pytest.raises(ConflictError, match="keeps changing"):
        change(store, KEY, lambda _: b"x")


@pytest.mark.parametrize("others", [b"", b"other,"])
def test_a_change_whose_answer_was_lost_is_not_made_twice_although_others_wrote_since(store, monkeypatch, others):
    true_replace, lost = type(store).replace, [True]

    def replace(self: Store, key: str, data: bytes, expected: bytes | None) -> bool:
        result = true_replace(self, key, data, expected)
        if lost and lost.pop():
            true_replace(self, key, data + others, data)
            raise UndecidedError("the answer was lost")
        return result

    monkeypatch.setattr(type(store), "replace", replace)

    def begins(found: bytes | None, written: bytes) -> bool:
        return bool(found and found.startswith(written))

    assert change(store, KEY, lambda data: (data or b"") + b"mine,", begins) == b"mine," + others == store.read(KEY)
