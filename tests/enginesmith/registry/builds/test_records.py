import pytest

from enginesmith.registry.builds.runs import recall, remember
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, record_key
from tests.enginesmith.registries import on_each_store, run_together

KEY = "0" * 64


@on_each_store
def test_a_step_is_remembered_with_its_blobs(store: Store) -> None:
    blob = store.put_bytes(b"x")
    assert recall(store, "export", KEY) is None
    remember(store, "export", KEY, {"onnx": blob, "notes": ["ä"]}, [blob])
    assert recall(store, "export", KEY) == {"onnx": blob, "notes": ["ä"]}
    assert recall(store, "build", KEY) is None and recall(store, "export", "1" * 64) is None


@on_each_store
def test_a_record_with_a_missing_blob_is_forgotten_and_can_be_made_again(store: Store) -> None:
    blob = store.put_bytes(b"x")
    remember(store, "export", KEY, {"n": 1}, [blob])
    store.remove(blob_key(blob))
    assert recall(store, "export", KEY) is None
    remember(store, "export", KEY, {"n": 2}, [store.put_bytes(b"y")])
    assert recall(store, "export", KEY) == {"n": 2}


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"{}", b'{"value":1,"blobs":[]}', b'{"value":{},"blobs":["../x"]}', b"[" * 100_000],
)
def test_an_unreadable_record_is_forgotten(store: Store, data: bytes) -> None:
    store.create(record_key("export", KEY), data)
    assert recall(store, "export", KEY) is None
    remember(store, "export", KEY, {"n": 1})
    assert recall(store, "export", KEY) == {"n": 1}


def test_nan_cannot_be_recorded(store: Store) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        remember(store, "export", KEY, {"n": float("nan")})


@on_each_store
def test_racing_writers_leave_a_whole_record(store: Store) -> None:
    run_together(lambda n=n: remember(store, "export", KEY, {"n": n}) for n in range(6))
    assert (recall(store, "export", KEY) or {})["n"] in range(6)
