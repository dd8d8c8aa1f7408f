"""Timing caches in the registry, with a stand-in for the backend that tunes: no GPU and no TensorRT is here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders.backends.optional_methods import GIVEN, GROWN
from builders.backends.tensorrt import TensorRT, TensorRTRTX
from builders.backends.tensorrt import build as tensorrt_timing
from builders.backends.tensorrt.build import keep_grown, merge_caches, use_given
from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.registry.gc import collect
from enginesmith.registry.store.folder import FileStore
from enginesmith.registry.store.layout import timing_key
from pipeline.compile.steps import engines
from pipeline.compile.steps.engines import TimingCache
from tests.pipeline.projects import raising


@dataclass(frozen=True)
class Tunes:
    """A cache is a sorted list of words; 'bad' words do not merge."""

    place: tuple[str, str] | None = ("NVIDIA L4", "10.16.1")

    def timing_place(self) -> tuple[str, str] | None:
        return self.place

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        words = {*older.split(), *newer.split()}
        if b"bad" in words:
            raise EnginesmithError("these do not go together")
        return b" ".join(sorted(words))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "driver_version", lambda: "580.65.06")


@pytest.fixture
def build(store: FileStore, tmp_path: Path) -> Callable[..., tuple[bytes | None, list[str]]]:
    """A build that learns a word; what it was given, and its notes."""
    count = iter(range(100))

    def run(word: str, meanwhile: Callable[[], Any] = lambda: None, tool: Any = None) -> tuple[bytes | None, list[str]]:
        folder = tmp_path / f"build-{next(count)}"
        folder.mkdir()
        cache = TimingCache(store, tool or Tunes(), folder)
        cache.fetch()
        inputs = (folder / GIVEN).read_bytes() if (folder / GIVEN).is_file() else None
        meanwhile()
        (folder / GROWN).write_bytes(b" ".join(sorted({*(inputs or b"").split(), word.encode()})))
        cache.keep()
        return inputs, cache.notes

    return run


Build = Callable[..., tuple[bytes | None, list[str]]]


def test_the_next_build_gets_the_measurements(build: Build) -> None:
    assert build("one") == (None, []) and build("two") == (b"one", []) and build("three") == (b"one two", [])


def test_concurrent_builds_both_keep_their_measurements(build: Build) -> None:
    build("one")
    assert build("two", meanwhile=lambda: build("three")) == (b"one", []) and build("four")[0] == b"one three two"


def test_caches_of_other_gpus_drivers_and_versions_are_separate(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build("one")
    assert build("x", tool=Tunes(("NVIDIA T4", "10.16.1")))[0] is None
    assert build("x", tool=Tunes(("NVIDIA L4", "11.4.0")))[0] is None
    monkeypatch.setattr(engines, "driver_version", lambda: "590.1")
    assert build("x")[0] is None
    assert timing_key("NVIDIA L4", "580.65.06", "10.16.1") == "timing/nvidia-l4/580.65.06/10.16.1.json"
    assert timing_key("../..", "", "10/..") == "timing/unknown/unknown/10.json"


def test_a_backend_without_a_cache_and_a_machine_without_a_gpu_keep_none(store: FileStore, build: Build) -> None:
    build("one", tool=TensorRTRTX())
    build("two", tool=Tunes(None))
    assert list(store.list("timing/")) == []
    assert TensorRT().timing_place() is None, "no GPU is here"


def test_a_damaged_or_lost_cache_is_omitted_with_a_note_and_replaced(store: FileStore, build: Build) -> None:
    build("one")
    key = timing_key("NVIDIA L4", "580.65.06", "10.16.1")
    digest = engines._read_digest(store.read(key))
    assert digest
    store.path(digest).chmod(0o644)
    store.path(digest).write_bytes(b"damaged")
    inputs, notes = build("two")
    assert inputs is None and len(notes) == 1 and "no timing cache was used" in notes[0]
    assert build("three") == (b"two", [])
    store.replace(key, b"{nonsense", store.read(key))
    assert build("four") == (None, []) and build("five")[0] == b"four"


def test_unmergeable_caches_are_replaced_with_a_note(build: Build) -> None:
    build("one")
    _, notes = build("bad", meanwhile=lambda: build("three"))
    assert notes == ["the timing cache of others was replaced: these do not go together"]
    assert build("x")[0] == b"bad one"


def test_a_failing_registry_gives_a_note(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raising(UnavailableError("down"))
    monkeypatch.setattr(FileStore, "replace", refuse)
    assert build("one") == (None, ["the timing cache was not kept: down"])
    monkeypatch.setattr(FileStore, "read", refuse)
    assert build("one")[1][0] == "no timing cache was used: down"


def test_a_too_long_cache_is_not_stored(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_BYTES", 2)
    assert build("one") == (None, ["the timing cache was not kept: it is 3 bytes long; the limit is 2"])


def test_garbage_collection_keeps_the_caches(store: FileStore, build: Build) -> None:
    build("one")
    build("two")
    (gone_item,) = collect(store).items
    assert store.read_blob(gone_item.name) == b"one", "and not those that were replaced"


class Config:
    """What the calls look like, for the order and the fallbacks; a real cache takes a GPU and TensorRT."""

    def __init__(self, takes: Callable[[bytes], bool]) -> None:
        self.takes, self.set = takes, None

    def create_timing_cache(self, data: bytes) -> bytes | None:
        if data == b"raises":
            raise RuntimeError("deserialization failed")
        return data if self.takes(data) else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        self.set = cache
        return True

    def get_timing_cache(self) -> Any:
        return type("Cache", (), {"serialize": lambda _: memoryview(b"grown")})()


@pytest.mark.parametrize("stale", [b"old", b"raises"])
def test_a_stale_cache_is_replaced(tmp_path: Path, stale: bytes) -> None:
    (tmp_path / GIVEN).write_bytes(stale)
    config = Config(lambda data: data != b"old")
    [(level, text)] = use_given(config, tmp_path)
    assert level == "WARNING" and "was not used, and a new one was started" in text and config.set == b""
    (tmp_path / GIVEN).write_bytes(b"good")
    assert use_given(config, tmp_path) == [] and config.set == b"good"
    keep_grown(config, tmp_path)
    assert (tmp_path / GROWN).read_bytes() == b"grown"


class Cache:
    """A cache whose words are joined; what TensorRT's bindings do with others, by the first word."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def combine(self, other: "Cache", ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        if other.data == b"throws":
            raise RuntimeError("device properties differ")
        self.data += b" " + other.data
        return other.data != b"refused"

    def serialize(self) -> bytes | None:
        return None if b"null" in self.data else self.data


class Library:
    """As `trt`, as far as caches are merged."""

    def Builder(self, logger: object) -> "Library":
        return self

    def create_builder_config(self) -> "Library":
        return self

    def create_timing_cache(self, data: bytes) -> Cache | None:
        return None if data == b"unread" else Cache(data)


def merges(older: bytes, newer: bytes) -> bytes:
    return merge_caches(Library(), None, older, newer)


@pytest.mark.parametrize("other", [b"throws", b"refused", b"unread", b"null"])
def test_a_cache_that_tensorrt_refuses_is_a_miss(build: Build, monkeypatch: pytest.MonkeyPatch, other: bytes) -> None:
    assert merges(b"one", b"two") == b"one two"
    with pytest.raises(EnginesmithError, match="does not merge"):
        merges(b"one", other)
    monkeypatch.setattr(Tunes, "merge_timing", lambda _, older, newer: merges(older, newer))
    build("one")
    _, notes = build(other.decode(), meanwhile=lambda: build("three"))
    assert len(notes) <= 1 and build("x")[0] is not None


@pytest.mark.parametrize("cache", [None, Cache(b"null")])
def test_a_tuner_without_a_cache_keeps_the_engine(tmp_path: Path, cache: Cache | None) -> None:
    keep_grown(SimpleNamespace(get_timing_cache=lambda: cache), tmp_path)
    assert not (tmp_path / GROWN).exists()


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_the_calls_exist_in_a_real_tensorrt(tmp_path: Path) -> None:
    """TensorRT-RTX has the same API with a cache that does nothing."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    assert isinstance(tensorrt_timing.use_given(trt.Builder(logger).create_builder_config(), tmp_path), list)
    assert isinstance(merge_caches(trt, logger, b"", b""), bytes)
