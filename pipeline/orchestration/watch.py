"""Watching a place for specs: one whose content is new is registered, and its event is sent to Prefect once.

Each look gathers the specs of the place with the digests of their files. The registry has which events were sent, by
this watcher or an earlier one. An event that was not, because the watcher was killed or the server was down, is sent at
the next look.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.core.digest import digest_of_file
from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.registry.registered_specs import registrations
from enginesmith.registry.store.base import Store
from pipeline.intake.bundle import bundle_of, named_files, register
from pipeline.intake.places import place_at
from pipeline.orchestration import events
from pipeline.orchestration.catalog import spec_files, without_graphs
from pipeline.orchestration.payloads import REGISTERED, remember_sent, was_sent
from pipeline.spec.ensembles.model import load_any

# Of a file: size in bytes, time of its last change in ns, inode.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class WatchedSpec:
    """A spec that was registered, or an error. said: which, in words.  told: whether its event was sent just now.

    digest: of the bundle of its files.
    """

    spec: str
    said: str
    told: bool = False
    digest: str | None = None


class Watch:
    """Looks at a place. say: called for each spec that is registered or cannot be read, once for each reason."""

    def __init__(self, store: Store, place: str, say: Callable[[WatchedSpec], object]) -> None:
        self._store, self._name, self._say = store, place, say
        self._stack = ExitStack()
        self._digests: dict[Path, tuple[Stamp, str]] = {}
        self._before: dict[Path, list[Stamp]] = {}
        self._complaints: dict[str, str] = {}
        self._taken: dict[Path, str] = {}

    def __enter__(self) -> Self:
        self._place = self._stack.enter_context(place_at(self._name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, interval_s: float, stop: threading.Event) -> None:
        """Look until `stop` is set. Where something is out of reach, say so once and look again."""
        while not stop.is_set():
            try:
                self.look()
                self._complaints.pop(self._name, None)
            except UnavailableError as error:
                self._complain(self._name, str(error))
            stop.wait(interval_s)

    def look(self, *, settled: bool = True) -> None:
        """Look once. settled: take a spec only when its files are as they were at the look before.

        Raises UnavailableError when the place, the registry or the Prefect server is out of reach.
        """
        self._place.refresh()
        for path in without_graphs(spec_files(self._place.folder)):
            name = path.relative_to(self._place.folder).as_posix()
            try:
                self._take(path, name, settled=settled)
            except UnavailableError:
                raise
            except EnginesmithError as error:
                self._complain(name, str(error))

    def _take(self, path: Path, name: str, *, settled: bool) -> None:
        spec = load_any(path)
        stamps = [_stamp(file) for _, file in sorted(named_files(spec))]
        still = self._before.get(path) == stamps
        self._before[path] = stamps
        if settled and not still:
            return
        digest = bundle_of(spec, self._digest).digest
        if self._taken.get(path) == digest:
            return
        kept = registrations(self._store, spec.model)
        # A bundle that was sent before and is not the newest is one that somebody changed back to: it is sent again.
        newest = bool(kept) and kept[-1].bundle.digest == digest
        if not (newest and was_sent(self._store, REGISTERED, digest)):
            item, _ = register(self._store, spec)
            sent = events.send_registered(self._store, item)
            remember_sent(self._store, REGISTERED, item.bundle.digest, sent.id)
            self._say(WatchedSpec(name, f"registered as {item.address}", True, item.bundle.digest))
        self._taken[path] = digest
        self._complaints.pop(name, None)

    def _digest(self, path: Path) -> str:
        """A file's digest. The file is read again only when its stamp changed."""
        stamp, known = _stamp(path), self._digests.get(path)
        if known is None or known[0] != stamp:
            known = self._digests[path] = (stamp, digest_of_file(path))
        return known[1]

    def _complain(self, name: str, reason: str) -> None:
        if self._complaints.get(name) != reason:
            self._complaints[name] = reason
            self._say(WatchedSpec(name, reason))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino
