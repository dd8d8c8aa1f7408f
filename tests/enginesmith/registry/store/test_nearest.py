from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginesmith.client.client import Client
from enginesmith.client.pull import BlobFetcher
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.store import nearest
from enginesmith.registry.store.base import FileStore, open_store
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import blob_key, channel_key
from enginesmith.registry.store.nearest import NearestStore, open_nearest
from enginesmith.registry.versions.channels import promote
from enginesmith.registry.versions.lookup import load, locate
from tests.enginesmith.registries import engine, flip, publish_engines

STABLE = channel_key("digits", "stable")


class Failing:
    """A store that fails as `error` says, after `bytes` of each range; counts what it is asked."""

    def __init__(self, store: FileStore) -> None:
        self.store, self.error, self.after, self.asked = store, None, 0, 0
        self.error: EnginesmithError | None

    def __getattr__(self, name: str) -> Any:
        result = getattr(self.store, name)
        if not callable(result) or name == "locator":
            return result

        def ask(*arguments: Any, **named: Any) -> Any:
            self.asked += 1
            if self.error is not None and name != "open_range":
                raise self.error
            return result(*arguments, **named)

        return ask

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Callable[[memoryview], None]]:
        self.asked += 1
        done = 0
        with self.store.open_range(digest, offset, size) as fill:

            def some(into: memoryview) -> None:
                nonlocal done
                if self.error is not None and done >= self.after:
                    into[:] = bytes(len(into))
                    raise self.error
                fill(into)
                done += len(into)

            yield some


class Places:
    """Two registries in folders, the first a mirror of the second; `store` reads from both."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.mirror = Failing(open_store(tmp_path / "mirror", create=True))  # type: ignore[arg-type]
        self.origin = Failing(open_store(tmp_path / "origin", create=True))  # type: ignore[arg-type]
        stores = {str(tmp_path / "mirror"): self.mirror, str(tmp_path / "origin"): self.origin}
        self.clock = 0.0
        monkeypatch.setattr(nearest, "open_store", lambda uri: stores[uri.removeprefix("file://")])
        monkeypatch.setattr(nearest.time, "monotonic", lambda: self.clock)
        self.uri = ",".join(stores)
        actual = open_nearest(self.uri, self.said.append)
        assert isinstance(actual, NearestStore)
        self.store = actual

    def publish(self, content: str) -> None:
        publish_engines(
            self.origin.store, [engine(self.origin.store, data=content.encode())], content, channel="stable"
        )

    def copy(self) -> None:
        reference = parse_reference("digits:stable")
        mirror(self.origin.store, [reference], self.mirror.store, with_channels=True)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(tmp_path, monkeypatch)


def put(places: Places, data: bytes) -> str:
    return places.mirror.store.put_bytes(data) and places.origin.store.put_bytes(data)


def test_the_first_place_with_the_object_is_read(places: Places, tmp_path: Path) -> None:
    digest, missing_digest = put(places, b"both"), places.origin.store.put_bytes(b"origin alone")
    assert places.store.read_blob(digest) == b"both" and places.store.stored_size(digest) == 4
    places.store.fetch(digest, tmp_path / "engine")
    assert places.origin.asked == 0
    assert places.store.read_blob(missing_digest) == b"origin alone" and places.store.size(missing_digest) == 12
    places.origin.store.create("models/a/pins/1.json", b"{}")
    assert places.store.read("models/a/pins/1.json") == b"{}" and places.store.read("models/a/pins/2.json") is None
    assert list(places.store.list("models/")) == ["models/a/pins/1.json"]
    assert list(places.store.children("models/")) == ["a/"]
    assert not places.said


def test_an_unreachable_place_is_skipped_for_a_while_and_reported_once(places: Places) -> None:
    digest = put(places, b"both")
    places.mirror.error = UnavailableError("the cable is out")
    requests = []
    for places.clock in (0.0, 1.0, 29.0, 31.0, 50.0, 62.0, 10_000.0):
        requests_before = places.mirror.asked
        assert places.store.read_blob(digest) == b"both"
        requests.append(places.mirror.asked - requests_before)
    assert requests == [1, 0, 0, 1, 0, 1, 1]
    (message,) = places.said
    assert "the cable is out" in message and places.mirror.uri in message
    places.mirror.error, places.clock = None, 20_000.0
    requests_before = places.origin.asked
    assert places.store.read_blob(digest) == b"both" and places.origin.asked == requests_before
    assert places.said[1:] == [f"{places.mirror.uri} answers again"]


def test_a_disconnected_region_continues_with_its_mirror(places: Places) -> None:
    places.publish("one")
    places.copy()
    places.origin.error = UnavailableError("cut off")
    assert locate(places.store, parse_reference("digits:stable")).manifest.version == "1"
    assert places.store.read(channel_key("digits", "candidate")) is None
    with pytest.raises(UnavailableError, match="cut off"):
        places.store.size("0" * 64)  # which the mirror lacks, and the registry may have
    places.mirror.error = UnavailableError("gone, too")
    with pytest.raises(UnavailableError):
        places.store.read(STABLE)
    places.mirror.error = None  # both are left alone now, and asked all the same
    assert places.store.read(STABLE) == places.mirror.store.read(STABLE)


@pytest.mark.parametrize("error", [UnavailableError("cut"), IntegrityError("it ends before it should")])
def test_a_blob_continues_in_the_next_place_after_a_break(places: Places, error: EnginesmithError) -> None:
    data = bytes(range(256)) * 8
    digest = put(places, data)
    places.mirror.error, places.mirror.after = error, 512
    result = bytearray(1024)
    with places.store.open_range(digest, 100, 1024) as fill:
        for start in range(0, 1024, 256):
            fill(memoryview(result)[start : start + 256])
    assert result == data[100:1124]
    places.origin.error = UnavailableError("the registry is out of reach")
    with pytest.raises(EnginesmithError), places.store.open_range(digest, 0, 1024) as fill:
        for start in range(0, 1024, 256):
            fill(memoryview(result)[start : start + 256])


def test_a_lagging_mirror_shows_its_content_and_the_registry_the_rest(places: Places) -> None:
    places.publish("one")
    places.copy()
    places.publish("two")

    def version() -> str:
        return locate(places.store, parse_reference("digits:stable")).manifest.version

    assert version() == "1"
    places.mirror.error = UnavailableError("down")
    assert version() == "2"
    places.mirror.error, places.clock = None, 1000.0
    assert version() == "1", "it does not remember what it saw elsewhere"
    places.copy()
    assert version() == "2"


def test_a_lost_engine_costs_no_other_one_while_the_registry_is_unreachable(places: Places, tmp_path: Path) -> None:
    pair = [engine(places.origin.store, precision=precision, data=precision.encode()) for precision in ("fp32", "int8")]
    publish_engines(places.origin.store, pair, "one", channel="stable")
    places.copy()
    best_data = Client(places.uri).pull("digits:stable", tmp_path / "both").path.read_bytes()
    [lost_text] = [str(item.digest) for item in pair if item.precision == best_data.decode()]
    places.mirror.store.path(lost_text).unlink()
    places.origin.error = UnavailableError("cut off")
    pulled_engine = Client(places.uri, say=places.said.append).pull("digits:stable", tmp_path / "one")
    assert pulled_engine.path.read_bytes() in {b"fp32", b"int8"} - {best_data}
    places.mirror.store.path(pulled_engine.engine.digest).unlink()
    with pytest.raises(UnavailableError, match="cut off"):
        Client(places.uri, say=places.said.append).pull("digits:stable", tmp_path / "none")


def test_a_tag_belongs_to_one_place(places: Places) -> None:
    places.publish("one")
    places.copy()
    data, tag = places.store.read_if_changed(STABLE, "")
    assert data and places.store.read_if_changed(STABLE, tag) == (None, tag)
    places.mirror.error = UnavailableError("down")
    assert places.store.read_if_changed(STABLE, tag)[0] == places.origin.store.read(STABLE)


def test_writes_go_to_the_registry(places: Places) -> None:
    places.publish("one")
    promote(places.store, load(places.store, "digits", "1"), "canary")
    assert places.origin.store.read(channel_key("digits", "canary"))
    assert places.mirror.store.read(channel_key("digits", "canary")) is None
    digest = places.store.put_bytes(b"new")
    assert places.origin.store.has(digest) and not places.mirror.store.has(digest)
    places.store.remove("models/digits/pins/1.json")
    assert places.store.strays() == () and places.store.sweep() == 0 and dict(places.store.sizes("blobs/"))


def test_a_place_with_wrong_bytes_is_followed_by_the_next(places: Places, tmp_path: Path) -> None:
    digest = put(places, b"the engine's bytes")
    flip(places.mirror.store, digest)
    for _ in range(2):
        assert BlobFetcher().fetch(places.store, BlobDigest(digest), 18, tmp_path / "engine") == "registry"
        assert (tmp_path / "engine").read_bytes() == b"the engine's bytes"
        (tmp_path / "engine").unlink()
    assert places.store.read_blob(digest) == b"the engine's bytes"
    places.store.fetch(digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"the engine's bytes"
    flip(places.origin.store, digest)
    with pytest.raises(IntegrityError, match="holds other bytes"):
        BlobFetcher().fetch(places.store, BlobDigest(digest), 18, tmp_path / "engine")


def test_a_client_pulls_despite_an_unreachable_place_and_half_a_file(places: Places, tmp_path: Path) -> None:
    places.publish("one")
    output: list[str] = []
    client = Client(f"http://127.0.0.1:9,{places.origin.store.root}", say=output.append, cache=tmp_path / "cache")
    assert client.pull("digits:stable", tmp_path / "out").path.read_bytes() == b"one"
    (message,) = output
    assert message.startswith("http://127.0.0.1:9 does not answer; reading ")
    with pytest.warns(UserWarning, match="does not answer; reading"):
        Client(f"http://127.0.0.1:9,{places.origin.store.root}").resolve("digits:stable")
    places.copy()
    [entry] = load(places.origin.store, "digits", "1").engines
    places.mirror.store.path(str(entry.digest)).unlink()
    (places.mirror.store.root / blob_key(str(entry.digest))).write_bytes(b"on")
    assert Client(places.uri).pull("digits:stable", tmp_path / "past half a file").path.read_bytes() == b"one"
