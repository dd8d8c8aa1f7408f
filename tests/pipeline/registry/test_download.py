"""Parts in any order, a digest in one; what was killed, cut or spoilt."""

import hashlib
import os
import signal
import threading
from pathlib import Path

import pytest

from builders.errors import IntegrityError, UnavailableError
from pipeline.registry import download as module
from pipeline.registry.cache import BlobCache
from pipeline.registry.delivery import Way
from pipeline.registry.download import download, journal_of, parts_of
from pipeline.registry.s3.store import S3Store
from pipeline.registry.store import Store
from tests.pipeline.registry.faulty_proxy import PASSING, Fault, FaultyProxy, Kind
from tests.pipeline.registry.registries import flip, in_child, names_in, on_each_store

PART = 1000
DATA = os.urandom(10 * PART + 123)
DIGEST = hashlib.sha256(DATA).hexdigest()


class Source:
    """Gives DATA, and notes what was asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.asked = data, []

    def __call__(self, start: int, into: memoryview) -> None:
        self.asked.append(start)
        into[:] = self.data[start : start + len(into)]


def run(path: Path, source, told=lambda there: None) -> str:
    return download(path, DIGEST, len(DATA), source, told, part=PART)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 25_000])
def test_parts_cover_a_blob_once(size: int) -> None:
    parts = parts_of(size, PART)
    assert [part.start for part in parts] == list(range(0, size, PART)) and sum(part.size for part in parts) == size


def test_parts_that_come_backwards_are_digested_in_order(tmp_path: Path) -> None:
    ready = {start: threading.Event() for start in range(0, len(DATA), PART)}
    ready[7 * PART].set()  # the first eight are asked for at once, and come from the last to the first

    def backwards(start: int, into: memoryview) -> None:
        if start <= 7 * PART:
            assert ready[start].wait(20)
        into[:] = DATA[start : start + len(into)]
        if 0 < start <= 7 * PART:
            ready[start - PART].set()

    told: list[int] = []
    assert run(tmp_path / "file", backwards, told.append) == DIGEST
    assert (tmp_path / "file").read_bytes() == DATA
    assert told == [*range(PART, len(DATA), PART), len(DATA)]


def test_buffers_are_bounded_while_the_oldest_part_is_late(tmp_path: Path) -> None:
    asked, late = [], threading.Event()

    def source(start: int, into: memoryview) -> None:
        asked.append(start)
        if len(asked) == module.CONNECTIONS + module._SPARE:
            late.set()
        if start == 0:
            assert late.wait(20)
            assert not threading.Event().wait(0.05) and len(asked) <= module.CONNECTIONS + module._SPARE
        into[:] = DATA[start : start + len(into)]

    assert run(tmp_path / "file", source) == DIGEST


def test_what_a_failed_download_brought_is_not_asked_for_again(tmp_path: Path) -> None:
    first, second = Source(), Source()

    def breaks(start: int, into: memoryview) -> None:
        if start == 5 * PART:
            raise UnavailableError("cut")
        first(start, into)

    with pytest.raises(UnavailableError, match="cut"):
        run(tmp_path / "file", breaks)
    assert run(tmp_path / "file", second) == DIGEST and (tmp_path / "file").read_bytes() == DATA
    assert 5 * PART in second.asked and not set(first.asked) & set(second.asked)


def test_a_killed_download_is_taken_up(tmp_path: Path) -> None:
    def die(start: int, into: memoryview) -> None:
        if start == 8 * PART:
            os.kill(os.getpid(), signal.SIGKILL)
        Source()(start, into)

    _, status = os.waitpid(in_child(lambda: run(tmp_path / "file", die)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    source = Source()
    assert run(tmp_path / "file", source) == DIGEST
    assert 0 < len(source.asked) <= 11 and 8 * PART in source.asked


@pytest.mark.parametrize("spoil", ["torn", "of another blob", "nonsense"])
def test_a_journal_that_cannot_be_used_is_forgotten(tmp_path: Path, spoil: str) -> None:
    def breaks(start: int, into: memoryview) -> None:
        if start == 10 * PART:
            raise UnavailableError("cut")
        Source()(start, into)

    with pytest.raises(UnavailableError):
        run(tmp_path / "file", breaks)
    journal = journal_of(tmp_path / "file")
    text = journal.read_text()
    journal.write_text(
        {"torn": text + "1", "of another blob": text.replace(DIGEST, "0" * 64), "nonsense": "\x00"}[spoil]
    )
    source = Source()
    assert run(tmp_path / "file", source) == DIGEST
    assert (0 in source.asked) == (spoil != "torn")


@on_each_store
@pytest.mark.parametrize("cached", [True, False])
def test_a_blob_is_delivered_whole(store: Store, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    digest, way = store.put_bytes(DATA), Way(BlobCache(tmp_path / "cache") if cached else None)
    told: list[tuple[int, int]] = []
    dest = tmp_path / "out" / "engine"
    assert Way(way.cache, lambda *there: told.append(there)).deliver(store, digest, len(DATA), dest) == "registry"
    assert dest.read_bytes() == DATA and told[-1] == (len(DATA), len(DATA)) and len(told) == 11
    assert names_in(dest.parent) == ["engine"]
    assert way.deliver(store, digest, len(DATA), dest) == "there"
    dest.unlink()
    again = way.deliver(store, digest, len(DATA), dest)
    assert again == ("cache" if cached and not store.near else "registry") and dest.read_bytes() == DATA


@on_each_store
def test_spoilt_bytes_never_land(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    digest = store.put_bytes(DATA)
    flip(store, digest)
    for way in (Way(BlobCache(tmp_path / "cache")), Way()):
        with pytest.raises(IntegrityError, match=rf"{digest}.*--repair"):
            way.deliver(store, digest, len(DATA), tmp_path / "out" / "engine")
    assert names_in(tmp_path / "out") == []
    with pytest.raises(IntegrityError, match="0000"):
        Way().deliver(store, "0" * 64, 5, tmp_path / "out" / "engine")
    with pytest.raises(IntegrityError, match=r"ends before|other bytes"):
        Way().deliver(store, store.put_bytes(b"short"), 50_000, tmp_path / "out" / "engine")


def test_spoilt_parts_of_before_cost_a_second_download(store: Store, tmp_path: Path) -> None:
    digest, cache = store.put_bytes(DATA), BlobCache(tmp_path / "cache")

    class Far:
        near, uri = False, "far"

        def read_range(self, digest: str, start: int, into: memoryview) -> None:
            store.read_range(digest, start, into)

    partial = cache.folder / "partial" / digest
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * len(DATA))
    about = {"digest": digest, "size_bytes": len(DATA), "part_bytes": module.PART_BYTES}
    with module._Journal(journal_of(partial), about) as journal:
        os.write(journal.fileno(), b"0\n")
    assert Way(cache).deliver(Far(), digest, len(DATA), tmp_path / "out") == "registry"  # type: ignore[arg-type]
    assert (tmp_path / "out").read_bytes() == DATA and names_in(cache.folder / "partial") == []


def test_two_processes_download_once_with_and_without_a_cache(store: Store, tmp_path: Path) -> None:
    digest = store.put_bytes(DATA)

    class Far:
        near, uri = False, "far"

        def read_range(self, digest: str, start: int, into: memoryview) -> None:
            (tmp_path / f"asked-{os.getpid()}-{start}").touch()
            store.read_range(digest, start, into)

    for way in (Way(BlobCache(tmp_path / "cache")), Way()):
        dest = tmp_path / f"out-{way.cache is None}"
        work = [in_child(lambda way=way, dest=dest: way.deliver(Far(), digest, len(DATA), dest)) for _ in range(4)]
        assert [os.waitpid(pid, 0)[1] for pid in work] == [0] * 4
        asked = list(tmp_path.glob("asked-*"))
        assert len(asked) == 1 and dest.read_bytes() == DATA
        asked[0].unlink()


@pytest.mark.parametrize(
    ("kind", "at"),
    [*((kind, 0.7) for kind in (*PASSING, "flipped answer")), *(("cut answer", n / 10) for n in range(5))],
)
def test_parts_that_meet_faults_come_in_the_end(
    store_behind_proxy: S3Store,
    proxy: FaultyProxy,
    kind: Kind,
    at: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    digest = store_behind_proxy.put_bytes(DATA)
    proxy.plan(lambda request: Fault(kind, at=at) if request.number in (2, 5) else None)
    way = Way(BlobCache(tmp_path / "cache"))
    assert way.deliver(store_behind_proxy, digest, len(DATA), tmp_path / "out") == "registry"
    assert (tmp_path / "out").read_bytes() == DATA and proxy.faults > 0
    # Bytes that came wrong unnoticed are all that costs a second download.
    assert kind.startswith("flipped") or proxy.count("GET") < 2 * 11
