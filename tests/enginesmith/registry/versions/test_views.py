import pytest

from enginesmith.core.errors import UnknownNameError
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.layout import channel_key, manifest_key
from enginesmith.registry.versions.index import list_models, list_versions, show_version
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore

MODELS, VERSIONS = 100, 20


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """Many versions, of which only those of `m000` can be read: whoever reads another manifest fails."""
    store = MemoryStore()
    entry = engine(store)
    for version in range(1, VERSIONS + 1):
        publish_engines(store, [entry], version, model="m000")
    for model in range(1, MODELS):
        for version in range(1, VERSIONS + 1):
            store.create(manifest_key(f"m{model:03}", str(version)), b"no manifest")
    return store


def test_models_are_paged_and_no_manifest_is_read(store: MemoryStore) -> None:
    store.calls.clear()
    rows = list_models(store, limit=10)
    assert [row.model for row in rows] == [f"m{model:03}" for model in range(10)]
    assert all(len(row.versions) == VERSIONS for row in rows)
    # Whether there is an index, the names of all models, the keys of ten, and one channel.
    assert store.calls == {"children": 1, "list": 10, "read": 2}


def test_pages_of_models_contain_all_models(store: MemoryStore) -> None:
    items: list[str] = []
    while page := list_models(store, limit=33, after=items[-1] if items else None):
        items += [row.model for row in page]
    assert items == [f"m{model:03}" for model in range(MODELS)]
    assert [row.model for row in list_models(store, after="m097")] == ["m098", "m099"]


def test_pages_of_versions_read_only_their_manifests(store: MemoryStore) -> None:
    store.calls.clear()
    rows = list_versions(store, "m000", limit=3)
    assert [row.version for row in rows] == ["18", "19", "20"] and store.calls["read"] == 3 + 1
    assert [row.version for row in list_versions(store, "m000", limit=3, before="3")] == ["1", "2"]
    assert [row.version for row in list_versions(store, "m000", limit=3, after="9")] == ["10", "11", "12"]
    items: list[str] = []
    while page := list_versions(store, "m000", limit=7, after=items[-1] if items else "0"):
        items += [row.version for row in page]
    assert items == [str(version) for version in range(1, VERSIONS + 1)]
    with pytest.raises(UnknownNameError):
        list_versions(store, "absent", limit=1)


def test_damaged_documents_do_not_hide_others() -> None:
    store = MemoryStore()
    entry = engine(store)
    for content in "ab":
        publish_engines(store, [entry], content)
    store.objects[manifest_key("digits", "1")] = b"{"
    store.objects[channel_key("digits", "stable")] = b"{"
    one, second_version = list_versions(store, "digits", limit=9)
    assert "is not JSON" in (one.damage or "") and one.engines == {} and "damage" not in second_version.to_json()
    assert (second_version.engines, second_version.channels) == ({"proven": 1}, {"candidate": "2"})
    assert list_models(store)[0].channels == {"candidate": "2", "stable": "(unreadable)"}
    assert show_version(store, parse_reference("digits@2")).channels == ("candidate",)
