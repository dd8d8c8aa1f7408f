import hashlib
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from enginesmith.client.pull import BlobFetcher
from enginesmith.core.errors import IntegrityError, UnavailableError
from enginesmith.registry.store import download as module
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.cache import BlobCache
from enginesmith.registry.store.download import CONNECTIONS, ConnectionScaler, download, journal_of, parts_of
from enginesmith.registry.store.files import BlobDigest
from tests.enginesmith.faulty_proxy import PASSING, Fault
from tests.enginesmith.registries import flip, in_child, names_in, on_each_kind, run_together
from tests.waiting import PATIENCE_S

PART = 1000
DATA = os.urandom(10 * PART + 123)
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOB = BlobDigest(DIGEST)


class Source:
    """Gives DATA, and notes which parts were asked for, and in which requests."""

    def __init__(self, before=lambda start: None) -> None:
        self.before, self.asked, self.requests = before, [], []

    @contextmanager
    def __call__(self, start: int, size: int):
        self.requests.append((start, size))
        at = start

        def fill(into: memoryview) -> None:
            nonlocal at
            self.asked.append(at)
            self.before(at)
            into[:] = DATA[at : at + len(into)]
            at += len(into)
            assert at <= start + size

        yield fill


def breaks(at: int):
    def before(start: int) -> None:
        if start == at:
            raise UnavailableError("cut")

    return before


def run(path: Path, source, listen=lambda there: None) -> str:
    return download(path, BLOB, len(DATA), source, listen, part=PART)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 25_000])
def test_parts_cover_a_blob_once(size: int) -> None:
    parts = parts_of(size, PART)
    assert [part.offset for part in parts] == list(range(0, size, PART)) and sum(part.size for part in parts) == size


@pytest.mark.parametrize("expected", [0, 1, 12])
def test_parts_in_reverse_order_are_digested_in_order(tmp_path, expected, monkeypatch):
    """From memory where there is room, else from the file."""
    monkeypatch.setattr(module, "SPAN_PARTS", 1)
    monkeypatch.setattr(module, "KEPT_PARTS", expected)
    ready_events = {start: threading.Event() for start in range(0, len(DATA), PART)}
    last_connections = (CONNECTIONS - 1) * PART
    ready_events[last_connections].set()  # the first four are asked for at once, and come from the last to the first

    def backwards(start: int) -> None:
        if start <= last_connections:
            assert ready_events[start].wait(PATIENCE_S)
            ready_events[max(0, start - PART)].set()

    progress: list[int] = []
    assert run(tmp_path / "file", Source(backwards), progress.append) == DIGEST
    assert (tmp_path / "file").read_bytes() == DATA
    assert progress == [*range(PART, len(DATA), PART), len(DATA)]


def test_other_parts_arrive_in_bounded_memory_while_the_oldest_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT_PARTS", 2)
    monkeypatch.setattr(module, "SPAN_PARTS", 1)
    part_memory, memory, other_semaphore = [], module._Arrivals._memory, threading.Semaphore(0)
    monkeypatch.setattr(module._Arrivals, "_memory", lambda self: part_memory.append(part := memory(self)) or part)

    def late(start: int) -> None:
        if start:
            other_semaphore.release()
        else:
            assert all(other_semaphore.acquire(timeout=PATIENCE_S) for _ in range(10))

    assert run(tmp_path / "file", Source(late)) == DIGEST
    assert len({id(part.obj) for part in part_memory if part is not None}) <= 2 and None in part_memory


def test_a_request_covers_several_parts_and_fewer_at_the_end(tmp_path: Path) -> None:
    source = Source()
    data_parts = len(parts_of(len(DATA), PART))
    assert run(tmp_path / "file", source) == DIGEST
    sizes = [-(-size // PART) for _, size in sorted(source.requests)]
    assert sum(sizes) == data_parts and sizes[0] == 2 and sizes[-1] == 1
    assert sorted(source.asked) == [part.offset for part in parts_of(len(DATA), PART)]


def test_more_connections_are_opened_while_the_rate_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPAN_PARTS", 1)
    monkeypatch.setattr(ConnectionScaler, "more", lambda self, size, now, connections: 1 if connections < 7 else 0)
    used_counts: list[int] = []
    end = module._Arrivals.__exit__
    monkeypatch.setattr(
        module._Arrivals, "__exit__", lambda self, *why: used_counts.append(len(self._threads)) or end(self, *why)
    )
    assert run(tmp_path / "file", Source()) == DIGEST and used_counts == [7]


@pytest.mark.parametrize(
    ("rates", "connections"),
    [
        ([200e6, 200e6], 4),  # they are fast
        ([85e6, 85e6, 85e6], 16),  # each gives what it can, however many: as far as it goes
        ([85e6, 45e6], 8),  # a link that they share: once was enough
        ([30e6, 30e6, 10e6], 16),
        ([85e6, 45e6, 200e6], 8),
    ],
)
def test_connections_double_if_each_is_slow_and_all_get_faster(rates, connections):
    """rates: of one connection, in bytes a second, as long as a number of them lasts."""
    pace, current_value, scaler = ConnectionScaler(0.0), 0.0, CONNECTIONS
    for rate in rates:
        current_value += 1e9 / rate
        added_counts = [pace.more(10**9, current_value, scaler) for _ in range(scaler)]
        assert not any(added_counts[:-1])
        scaler += added_counts[-1]
    assert scaler == connections


def test_a_parallel_download_starts_with_its_share_of_connections(tmp_path: Path) -> None:
    single_source, source = Source(), Source()
    assert run(tmp_path / "alone", single_source) == DIGEST
    digest = download(tmp_path / "shared", BLOB, len(DATA), source, lambda _: None, part=PART, beside=8)
    assert digest == DIGEST and (tmp_path / "shared").read_bytes() == DATA
    assert max(size for _, size in source.requests) == 2 * PART  # of 16 parts at most; of 11 one alone asks for 6
    assert [start for start, _ in source.requests] == sorted(start for start, _ in source.requests)


def test_parts_of_a_failed_download_are_not_requested_again(tmp_path: Path) -> None:
    first_source, second_source = Source(breaks(5 * PART)), Source()
    with pytest.raises(UnavailableError, match="cut"):
        run(tmp_path / "file", first_source)
    done_numbers = {int(line) * PART for line in journal_of(tmp_path / "file").read_text().splitlines()[1:]}
    assert done_numbers and 5 * PART not in done_numbers
    assert run(tmp_path / "file", second_source) == DIGEST and (tmp_path / "file").read_bytes() == DATA
    assert sorted(second_source.asked) == sorted(set(range(0, len(DATA), PART)) - done_numbers)


def test_a_killed_download_is_resumed(tmp_path: Path) -> None:
    def die(start: int) -> None:
        if start == 8 * PART:
            os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(in_child(lambda: run(tmp_path / "file", Source(die))), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    source = Source()
    assert run(tmp_path / "file", source) == DIGEST
    assert 0 < len(source.asked) <= 11 and 8 * PART in source.asked


@pytest.mark.parametrize("spoil", ["torn", "of another blob", "nonsense"])
def test_an_unusable_journal_is_dropped(tmp_path: Path, spoil: str) -> None:
    with pytest.raises(UnavailableError):
        run(tmp_path / "file", Source(breaks(10 * PART)))
    journal = journal_of(tmp_path / "file")
    text = journal.read_text()
    assert "\n0\n" in text
    spoilt_fields = {"torn": text + "1", "of another blob": text.replace(DIGEST, "0" * 64), "nonsense": "\x00"}
    journal.write_text(spoilt_fields[spoil])
    source = Source()
    assert run(tmp_path / "file", source) == DIGEST
    assert (0 in source.asked) == (spoil != "torn")


@on_each_kind
@pytest.mark.parametrize("cached", [True, False])
def test_a_blob_is_complete(store: Store, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    blob_digest = BlobDigest(store.put_bytes(DATA))
    fetcher = BlobFetcher(BlobCache(tmp_path / "cache") if cached else None)
    progress: list[tuple[int, int]] = []
    dest = tmp_path / "out" / "engine"
    telling_fetcher = BlobFetcher(fetcher.cache, lambda *there: progress.append(there))
    assert telling_fetcher.fetch(store, blob_digest, len(DATA), dest) == "registry"
    assert dest.read_bytes() == DATA and progress[-1] == (len(DATA), len(DATA)) and len(progress) == 11
    assert names_in(dest.parent) == ["engine"]
    assert fetcher.fetch(store, blob_digest, len(DATA), dest) == "there"
    dest.unlink()
    second_fetch = fetcher.fetch(store, blob_digest, len(DATA), dest)
    assert second_fetch == ("cache" if cached and not store.near else "registry") and dest.read_bytes() == DATA


@on_each_kind
def test_corrupt_bytes_never_arrive(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    digest = store.put_bytes(DATA)
    flip(store, digest)
    for fetcher in (BlobFetcher(BlobCache(tmp_path / "cache")), BlobFetcher()):
        with pytest.raises(IntegrityError, match=rf"{digest}.*--repair"):
            fetcher.fetch(store, BlobDigest(digest), len(DATA), tmp_path / "out" / "engine")
    assert names_in(tmp_path / "out") == []
    with pytest.raises(IntegrityError, match="0000"):
        BlobFetcher().fetch(store, BlobDigest("0" * 64), 5, tmp_path / "out" / "engine")
    with pytest.raises(IntegrityError, match=r"ends before|other bytes"):
        BlobFetcher().fetch(store, BlobDigest(store.put_bytes(b"short")), 50_000, tmp_path / "out" / "engine")


class Far:
    """A store elsewhere; a file in `folder` for each range that is asked for."""

    near, uri = False, "far"

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder

    def open_range(self, digest: str, offset: int, size: int):
        (self.folder / f"asked-{os.getpid()}-{offset}").touch()
        return self.store.open_range(digest, offset, size)


def test_earlier_corrupt_parts_cost_a_second_download(store: Store, tmp_path: Path) -> None:
    digest, cache = store.put_bytes(DATA), BlobCache(tmp_path / "cache")
    partial_path = cache.folder / "partial" / digest
    partial_path.parent.mkdir(parents=True)
    partial_path.write_bytes(b"x" * len(DATA))
    fields = {"digest": digest, "size_bytes": len(DATA), "part_bytes": module.PART_BYTES}
    with module._open_journal(journal_of(partial_path), fields) as (_, journal):
        os.write(journal, b"0\n")
    assert BlobFetcher(cache).fetch(Far(store, tmp_path), BlobDigest(digest), len(DATA), tmp_path / "out") == "registry"
    assert (tmp_path / "out").read_bytes() == DATA and names_in(cache.folder / "partial") == []


def test_two_processes_download_once_with_and_without_a_cache(store: Store, tmp_path: Path) -> None:
    digest = store.put_bytes(DATA)
    for fetcher in (BlobFetcher(BlobCache(tmp_path / "cache")), BlobFetcher()):
        dest = tmp_path / f"out-{fetcher.cache is None}"
        run_together([partial(fetcher.fetch, Far(store, tmp_path), BlobDigest(digest), len(DATA), dest)] * 4)
        request_files = list(tmp_path.glob("asked-*"))
        assert len(request_files) == 1 and dest.read_bytes() == DATA
        request_files[0].unlink()


@pytest.mark.parametrize(
    ("kind", "at"),
    [*((kind, 0.7) for kind in (*PASSING, "flipped answer")), *(("cut answer", n / 10) for n in range(5))],
)
def test_parts_with_faults_arrive_in_the_end(store_behind_proxy, proxy, kind, at, tmp_path, monkeypatch):
    monkeypatch.setattr(module.download, "__kwdefaults__", {"part": PART})
    digest = store_behind_proxy.put_bytes(DATA)
    proxy.plan(lambda request: Fault(kind, at=at) if request.number in (2, 5) else None)
    fetcher = BlobFetcher(BlobCache(tmp_path / "cache"))
    assert fetcher.fetch(store_behind_proxy, BlobDigest(digest), len(DATA), tmp_path / "out") == "registry"
    assert (tmp_path / "out").read_bytes() == DATA and proxy.faults > 0
    # Bytes that came wrong unnoticed are all that costs a second download.
    assert kind.startswith("flipped") or proxy.count("GET") < 2 * 11
