"""Publications that are hurt on the way: `python -m tests.enginesmith.registry.fault_runs --runs 600 --seed 1`.

Each run publishes a version, with an engine in one piece or in parts, and something happens to it at a random moment: a
fault of the network or the server, or SIGKILL. Then it is looked at from elsewhere: what was published before is
there, unchanged, the channel leads to a whole version, and publishing again completes, as if nothing had been. A run
in which that is not so raises AssertionError with its number and seed.
"""

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.store.base import FileStore, Store, open_store
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channel_state, lookup
from enginesmith.registry.versions.channel_state import read_history
from enginesmith.registry.versions.publish import Published
from tests.enginesmith.faulty_proxy import Fault, FaultyProxy, Kind, Request, proxying
from tests.enginesmith.object_stores.kinds import ENVIRONMENT, FOREIGN, GOOGLES_LIMIT, KINDS, ServerKind, past
from tests.enginesmith.registries import engine, in_child, publish_engines

# One fault at one request, and the same at a third of all requests until the end ('storm').
ONCE: tuple[Kind, ...] = (
    "refused", "cut request", "lost answer", "cut answer", "error", "error after", "slow", "silent", "flipped request",
    "flipped answer", "killed before", "killed after",
)  # fmt: skip
STORM: tuple[Kind, ...] = ("refused", "cut request", "lost answer", "cut answer", "error", "error after")
PER_REGISTRY = 10
# The publication was over before the fault; it succeeded all the same; it ended with an error of ours; it was killed.
ENDS = ("too late", "went on", "told", "killed")
# The file operations that a publication into a folder makes; it is killed before one of them.
WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "fcntl.flock"}


@dataclass
class Tally:
    """By fault: how often which end, how often the version was there before the retry. swept: uploads left behind."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    swept: int = 0

    def add(self, fault: str, end: str, there: bool) -> None:
        self.ends.setdefault(fault, Counter())[end] += 1
        self.seen[fault] += there

    @property
    def runs(self) -> int:
        return sum(counter.total() for counter in self.ends.values())

    def table(self) -> str:
        head = "| fault | runs | came too late | went on by itself | told | killed | version was there | lost or torn |"
        rows = [
            f"| {fault} | {ends.total()} | {' | '.join(str(ends[end]) for end in ENDS)} | {self.seen[fault]} | 0 |"
            for fault, ends in sorted(self.ends.items())
        ]
        return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


@dataclass(frozen=True)
class Work:
    """One publication: its number is its content and, if nothing is lost, its version."""

    number: int
    size: int

    def data(self) -> bytes:
        return random.Random(self.number).randbytes(self.size)

    def publish(self, store: Store) -> Published:
        return publish_engines(store, [engine(store, data=self.data())], self.number)


def run_all(
    runs: int, seed: int, server: str, folder: Path, say: Callable[[str], None] = lambda _: None, kind: str = "s3"
) -> Tally:
    """So many runs, spread over registries in a bucket and in folders. kind: of the server."""
    rng, tally = random.Random(seed), Tally()
    with proxying(server) as proxy, _impatient(KINDS[kind]):
        for number in range(0, runs, PER_REGISTRY):
            count = min(PER_REGISTRY, runs - number)
            if (number // PER_REGISTRY) % 6 == 5:
                _hurt_folder(folder / str(number), count, rng, tally)
            else:
                prefix = f"faults-{os.getpid()}-{seed}-{number}"
                _hurt_bucket(KINDS[kind], prefix, proxy, count, rng, tally)
            say(f"{tally.runs} runs")
    return tally


@contextlib.contextmanager
def _impatient(kind: ServerKind) -> Iterator[None]:
    """Short pauses and timeouts, and small parts."""
    with pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr(api, "FIRST_PAUSE_S", 0.001)
        patched_context.setattr(api, "LONGEST_PAUSE_S", 0.01)
        patched_context.setattr(api, "READ_TIMEOUT_S", 0.5)
        patched_context.setattr(api, "PART_BYTES", kind.part)
        if kind.name == "gs":
            patched_context.setattr(GOOGLES_LIMIT, kind.part)
        yield


def _hurt_bucket(
    kind: ServerKind, prefix: str, proxy: FaultyProxy, count: int, rng: random.Random, tally: Tally
) -> None:
    proxy.fine()
    hurt_store = open_store(kind.uri(proxy.url, prefix), create=True)
    assert isinstance(hurt_store, ObjectStore)
    good_store = past(hurt_store, proxy.server)
    with pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr(api, "READ_TIMEOUT_S", 60.0)  # what looks on is patient: a busy machine is no fault
        Work(1, 200).publish(good_store)
    for number in range(2, count + 2):
        work = Work(number, rng.choice((200, kind.part * 7 // 2)))
        randint = rng.randint(1, 25 if work.size < kind.part else 32)
        storm = rng.random() < 0.3
        fault = Fault(rng.choice(STORM if storm else ONCE), at=rng.random())
        name = f"bucket: {fault.kind}" + (", a third of all requests" if storm else "")
        end = _publish_through(proxy, hurt_store, work, fault, _storm(fault, rng) if storm else _at(fault, randint))
        _check(good_store, work, name, end, tally)
    tally.swept += good_store.sweep()  # of writers that were killed, and of answers that were lost when an upload began
    result = verify(good_store)
    assert result.sound and not result.problems, result.problems


def _at(fault: Fault, number: int) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.number == number else None


def _storm(fault: Fault, rng: random.Random) -> Callable[[Request], Fault | None]:
    own_rng = random.Random(rng.random())
    return lambda _: replace(fault, at=own_rng.random()) if own_rng.random() < 1 / 3 else None


def _publish_through(
    proxy: FaultyProxy, store: Store, work: Work, fault: Fault, plan: Callable[[Request], Fault | None]
) -> str:
    """Publish through the proxy while it carries out its plan; how it ended."""
    if fault.kind.startswith("killed"):
        return _publish_killed(proxy, store, work, plan)
    proxy.plan(plan)
    try:
        work.publish(store)
        return "went on" if proxy.faults else "too late"
    except EnginesmithError:
        return "told"
    finally:
        proxy.fine()


def _publish_killed(proxy: FaultyProxy, store: Store, work: Work, plan: Callable[[Request], Fault | None]) -> str:
    """In a process that is killed when its n-th request arrives."""
    ready_fd, go = os.pipe()

    def wait_and_publish() -> None:
        os.read(ready_fd, 1)
        work.publish(store)

    pid = in_child(wait_and_publish)
    proxy.plan(lambda request: replace(actual, pid=pid) if (actual := plan(request)) else None)
    os.write(go, b"x")
    status = os.waitpid(pid, 0)[1]
    os.close(ready_fd)
    os.close(go)
    proxy.fine()
    assert status in (0, signal.SIGKILL), f"run {work.number}: status {status}"
    return "killed" if status else "too late"


def _hurt_folder(root: Path, count: int, rng: random.Random, tally: Tally) -> None:
    store = open_store(root, create=True)
    Work(1, 200).publish(store)
    for number in range(2, count + 2):
        work, step = Work(number, 3500), rng.randint(1, 60)
        pid = in_child(lambda work=work, step=step: _publish_until(store, work, step))
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), f"run {number}: status {status}"
        assert isinstance(open_store(root, create=True), FileStore)
        _check(store, work, "folder: killed before a file operation", "killed" if status else "too late", tally)
    result = verify(store)
    assert result.sound and not result.problems, result.problems


def _publish_until(store: Store, work: Work, step: int) -> None:
    die_at_write(step)
    work.publish(store)


def die_at_write(step: int) -> None:
    """Have this process killed before its n-th file operation from now on."""
    count = 0

    def die(event: str, _: object) -> None:
        nonlocal count
        if event in WRITES and (count := count + 1) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)


def _check(store: Store, work: Work, name: str, end: str, tally: Tally) -> None:
    """From elsewhere: what was there is there, and publishing again completes."""
    texts_before = [str(number) for number in range(1, work.number)]
    versions = lookup.versions(store, "digits")
    flag = str(work.number) in versions
    assert versions == [*texts_before, *([str(work.number)] if flag else [])], (name, versions)
    channel = channel_state.read_channel(store, "digits", "candidate")
    assert channel is not None and channel.version in versions[-2:], name
    serving_manifest = lookup.load(store, "digits", channel.version)
    assert len(store.read_blob(str(serving_manifest.engines[0].digest))) == serving_manifest.engines[0].size_bytes, name
    assert end not in ("went on", "too late") or channel.version == str(work.number), name
    published_manifest = work.publish(store)
    assert (published_manifest.version, published_manifest.existed) == (str(work.number), flag), name
    assert store.read_blob(str(published_manifest.manifest.engines[0].digest)) == work.data(), name
    after = channel_state.read_channel(store, "digits", "candidate")
    assert after is not None and [move.version for move in read_history(store, after).moves] == [
        *texts_before,
        str(work.number),
    ], name
    tally.add(name, end, flag)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hurt publications and see that nothing is lost.")
    parser.add_argument("--runs", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=list(KINDS), default="s3")
    chosen = parser.parse_args()
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    with (
        KINDS[chosen.store].serving() as server,
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        tally = run_all(
            chosen.runs, chosen.seed, server, Path(folder), lambda text: print(text, file=sys.__stderr__), chosen.store
        )
    print(f"{tally.runs} runs, seed {chosen.seed}; {tally.swept} unfinished uploads swept\n\n{tally.table()}")


if __name__ == "__main__":
    main()
