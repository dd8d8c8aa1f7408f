from collections.abc import Iterator
from pathlib import Path

import pytest

from enginery.registry.store.base import Store, open_store
from enginery.registry.store.s3 import answers, upload
from enginery.registry.store.s3.store import S3Store
from tests.enginery.faulty_proxy import FaultyProxy, proxying


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty registry in a folder; with `registries.on_each_store`, one of every kind."""
    kind = getattr(request, "param", "file")
    place = request.getfixturevalue("s3_uri") if kind == "s3" else tmp_path / "registry"
    return open_store(place, create=True)


@pytest.fixture(scope="session")
def running_proxy(s3_server: str) -> Iterator[FaultyProxy]:
    with proxying(s3_server) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    """A proxy without faults yet, in front of the S3 server; pauses are short, and parts have a thousand bytes."""
    monkeypatch.setattr(answers, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    running_proxy.fine()
    return running_proxy


@pytest.fixture
def store_behind_proxy(proxy: FaultyProxy, s3_uri: str) -> S3Store:
    """An empty registry that is reached through the proxy."""
    store = open_store(f"{s3_uri.partition('?')[0]}?endpoint={proxy.url}", create=True)
    assert isinstance(store, S3Store)
    proxy.fine()
    return store
