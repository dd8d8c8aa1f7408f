import pytest

from enginesmith.core.errors import ConflictError, UndecidedError
from enginesmith.registry.store import base
from enginesmith.registry.store.base import Store, change
from tests.enginesmith.registries import on_each_kind

KEY = "history/x.json"


@on_each_kind
def test_the_slower_download_continues_from_the_existing_bytes(store: Store) -> None:
    seen_data: list[bytes | None] = []

    def add(data: bytes | None) -> bytes:
        if not seen_data:
            store.create(KEY, b"other,")  # another writer, in between
        seen_data.append(data)
        return (data or b"") + b"mine,"

    assert change(store, KEY, add) == b"other,mine," == store.read(KEY)
    assert seen_data == [None, b"other,"]


def test_an_unchanged_document_is_not_written(store: Store) -> None:
    assert change(store, KEY, lambda _: None) is None and store.read(KEY) is None
    store.create(KEY, b"x")
    assert change(store, KEY, lambda data: data) == b"x"


def test_a_document_that_keeps_changing_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_LOSERS_PAUSE_S", 0)
    monkeypatch.setattr(type(store), "replace", lambda *_: False)
    with pytest.raises(ConflictError, match="keeps changing"):
        change(store, KEY, lambda _: b"x")


@pytest.mark.parametrize("others", [b"", b"other,"])
def test_a_change_with_a_lost_answer_is_not_repeated_despite_other_writes(store, monkeypatch, others):
    true_replace, lost_flags = type(store).replace, [True]

    def replace(self: Store, key: str, data: bytes, expected: bytes | None) -> bool:
        result = true_replace(self, key, data, expected)
        if lost_flags and lost_flags.pop():
            true_replace(self, key, data + others, data)
            raise UndecidedError("the answer was lost")
        return result

    monkeypatch.setattr(type(store), "replace", replace)

    def begins(data: bytes | None, written: bytes) -> bool:
        return bool(data and data.startswith(written))

    assert change(store, KEY, lambda data: (data or b"") + b"mine,", begins) == b"mine," + others == store.read(KEY)
