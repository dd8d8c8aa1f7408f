"""Follows a channel: the link `current` always leads to a complete, verified engine, of the version that is promoted.

::

    engines/
      3-8a41c0b2d9e7f631/        one folder a description: digits-3-l4-int8.engine and digits-3-l4-int8.json
      current -> 3-8a41c0b2d9e7f631

A swap is one rename over the link `current`. A server that opens `current/...` gets the old engine or the new one; the
old folder stays for servers that have it open. A registry that is out of reach, a version without a compatible engine
and a failed download change nothing; they are reported, and tried again. An unchanged channel costs one conditional
request.

With a trust policy, the version that is served is checked again at every look (`TrustRecheck`), since keys are revoked
while channels stay. An engine that is trusted no longer is not taken away, because a server has it open: that is
reported, and a file `distrusted` beside `current` says so for as long as it lasts, for readiness probes to find.
"""

import fcntl
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from enginery.client.fetch import BlobFetcher, Origin
from enginery.client.hooks import Hook
from enginery.client.locate import VersionLocator
from enginery.client.pull import Pulled, download_best, download_engine, folder_name, rank_located
from enginery.client.reporting import HookFailed, Reporter
from enginery.client.resolve import Policy, Resolution
from enginery.client.trust_recheck import TrustRecheck, read_link
from enginery.core.errors import EngineryError, InputError, UnavailableError, UnknownNameError
from enginery.core.hardware.machine import Machine
from enginery.core.names import Reference
from enginery.registry.store.base import Store
from enginery.registry.store.files import make_folder, reachable, sync_folder, write_whole
from enginery.registry.versions.lookup import Channel, Located, channel_names
from enginery.registry.versions.pointers import Pointer
from enginery.registry.versions.refresh import is_current

CURRENT = "current"
_LOCK = ".enginery-watch.lock"
_HOOKED = ".enginery-hooked"
_STAGING = ".enginery-staging-"
_FOLDER = re.compile(r".+-[0-9a-f]{16}")
_JITTER = 0.2
# Every so many looks the channel is read beside its pointer.
LOOKS_A_CHANNEL = 30


@dataclass(frozen=True)
class Swap:
    """What `current` points to. folder: the one behind the link.  previous: name of the one before, or ''.

    swapped: whether this look moved the link.  origin: where the engine's bytes came from.
    """

    model: str
    version: str
    channel: str
    digest: str
    folder: Path
    engine: Path
    description: Path
    current: Path
    previous: str
    swapped: bool
    origin: Origin

    def facts(self) -> dict[str, str]:
        """The facts that hooks get, as text by name."""
        given = ("model", "version", "channel", "digest", "folder", "engine", "description", "current", "previous")
        return {name: str(getattr(self, name)) for name in given}


class ChannelWatcher:
    """Follows one channel into one folder.

    locator: finds versions in the registry; called at each look.  interval_s: seconds between looks, a fifth more or
    less at random.  keep: number of older folders that stay.  say: called with a message when something happens.
    reporter: reports to rollouts what is served.

    Raises InputError for a reference that is no channel.
    """

    def __init__(
        self,
        locator: Callable[[], VersionLocator],
        reference: Reference,
        machine: Machine,
        dest: Path,
        *,
        policy: Policy,
        fetcher: Callable[[], BlobFetcher],
        interval_s: float = 30.0,
        hook: Hook | None = None,
        keep: int = 2,
        say: Callable[[str], object] = print,
        reporter: Reporter | None = None,
    ) -> None:
        if reference.channel is None:
            raise InputError(
                f"{reference.model!r} is no channel, and only channels move; give {reference.model}:stable"
            )
        self._locator, self._reference, self._machine, self._policy = locator, reference, machine, policy
        self._dest, self._fetcher, self._hook, self._keep = dest.expanduser().absolute(), fetcher, hook, keep
        self._interval_s, self._say = interval_s, say
        self._trust_recheck = TrustRecheck(self._dest / CURRENT, policy.trust)
        self._followed: Pointer | Channel | None = None
        self._stale: Pointer | None = None
        self._looks = 0
        self._served: Swap | None = None
        self._reporter = reporter
        self._complaint = ""

    def once(self) -> Swap:
        """Look once, and return what is served. Raises what went wrong; `current` then stays as it was."""
        with self._alone():
            return self._look()

    def run(self, stop: Event) -> Swap | None:
        """Look until `stop` is set; return what is served then.

        Raises InputError at the first look, for what will not pass by itself. Later it is reported like any other
        error: a file that somebody is editing must not end the watcher.
        """
        with self._alone():
            while not stop.is_set():
                try:
                    self._look()
                    self._complaint = ""
                except EngineryError as error:
                    if self._ends(error):
                        raise
                    self._complain(str(error))
                stop.wait(self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - no secret
        return self._served

    def _ends(self, error: EngineryError) -> bool:
        """Whether an error will not pass by itself, and nothing was served before it."""
        wrong = isinstance(error, InputError) and not isinstance(error, UnknownNameError)
        return wrong and self._served is None

    def _look(self) -> Swap:
        """Swap if the channel moved, and call the hook if it was not called for what is served and is trusted; report
        what came of it, where a rollout asks for that."""
        locator = self._locator()
        try:
            swap = self._try(locator)
        except EngineryError as error:
            self._report(locator, error)
            raise
        self._report(locator, None)
        return swap

    def _report(self, locator: VersionLocator, error: EngineryError | None) -> None:
        if self._reporter:
            followed = self._followed if error is None else None
            pointer = followed if isinstance(followed, Pointer) else None
            facts = self._served.facts() if self._served else None
            self._reporter.look(locator, self._reference, pointer, facts, error)

    def _try(self, locator: VersionLocator) -> Swap:
        try:
            swap = self._follow(locator)
        except EngineryError as error:  # about where the channel leads; what is served is another question
            if not isinstance(error, UnavailableError) and not self._ends(error):
                self._trust_recheck.check(locator.store)
            raise
        self._trust_recheck.check(locator.store)
        self._call_hook(swap)
        return swap

    def _follow(self, locator: VersionLocator) -> Swap:
        """Swap if the channel moved."""
        pointer = self._read_pointer(locator)
        leads: Pointer | Channel = pointer or self._read_channel(locator)
        if self._is_for_others(leads, locator):
            self._followed = leads
        if leads != self._followed or self._served is None:
            located = locator.locate_by(pointer, self._reference)
            self._served, whole = self._serve(locator.store, located)
            # Last, so that whatever fails is tried again, as is an engine that was lost.
            self._followed = leads if whole else None
        return self._served

    def _is_for_others(self, leads: Pointer | Channel, locator: VersionLocator) -> bool:
        """Whether a pointer changed, and leads this node where it led before: a rollout that reaches others."""
        known, node = self._followed, locator.node
        if not isinstance(known, Pointer) or not isinstance(leads, Pointer) or known == leads:
            return False
        served = leads.served_to(node)
        return served is not None and known.served_to(node) == served

    def _read_pointer(self, locator: VersionLocator) -> Pointer | None:
        """The channel's pointer; None where the channel itself must be read: there is none, or it is being moved.

        Every so many looks the channel is read beside it. One that leads elsewhere was moved by a writer that knows
        no pointers, or was killed at the worst moment; its pointer is followed no longer until it changes.
        """
        model, channel = self._reference.model, str(self._reference.channel)
        pointer = locator.read_pointer(model, channel)
        self._looks += 1
        if pointer is None or pointer.settled is None or pointer == self._stale:
            return None
        if self._looks % LOOKS_A_CHANNEL == 0:
            found = locator.read_channel(model, channel)
            if found is not None and not is_current(pointer, found):
                self._stale = pointer
                self._say(
                    f"the pointer of {self._reference} leads to version {pointer.settled.version} and the channel to "
                    f"{found.version}, which is followed; `enginery verify --repair` mends the pointer"
                )
                return None
        return pointer

    def _read_channel(self, locator: VersionLocator) -> Channel:
        """The channel itself. Raises UnknownNameError where there is none."""
        model, channel = self._reference.model, str(self._reference.channel)
        found = locator.read_channel(model, channel)
        if found is None:
            locator.check_registry()
            known = ", ".join(channel_names(locator.store, model)) or "none"
            raise UnknownNameError(f"there is no channel {model}:{channel}; there are: {known}")
        return found

    def _serve(self, store: Store, located: Located) -> tuple[Swap, bool]:
        """Download and swap; return what is served then, and whether it is the best engine: False if that is lost."""
        located, answer = rank_located(store, located, self._machine, self._policy, sure=False)
        with reachable(f"writing {self._dest}"):
            pulled = download_best(answer, lambda resolution: self._download(store, located, resolution))
            folder = self._dest / folder_name(located, pulled.engine)
            previous = self._swap(folder.name)
        swap = Swap(
            model=located.manifest.model,
            version=located.manifest.version,
            channel=str(self._reference.channel),
            digest=str(pulled.engine.digest),
            folder=folder,
            engine=folder / pulled.path.name,
            description=folder / pulled.description.name,
            current=self._dest / CURRENT,
            previous=previous if previous != folder.name else "",
            swapped=previous != folder.name,
            origin=pulled.origin,
        )
        self._trust_recheck.note_served(folder.name, located.manifest, located.documents)
        if swap.swapped:
            self._say(f"{swap.model}:{swap.channel} is {swap.version} now: {pulled.engine.unit} ({swap.origin})")
            for line in pulled.warnings:
                self._say(line)
        os.utime(folder)
        self._prune(folder.name, previous)
        return swap, not pulled.resolution.lost

    def _download(self, store: Store, located: Located, resolution: Resolution) -> Pulled:
        """Download an engine to its folder: a new one appears complete, in an old one what is damaged is replaced."""
        folder = self._dest / folder_name(located, resolution.chosen)
        place = folder if folder.is_dir() else self._dest / f"{_STAGING}{str(resolution.chosen.digest)[:16]}"
        pulled = download_engine(store, located, resolution, place, self._fetcher())
        if place != folder:
            place.rename(folder)
            sync_folder(self._dest)
        return pulled

    def _swap(self, name: str) -> str:
        """Point `current` to the folder `name`; return where it pointed before."""
        current = self._dest / CURRENT
        before = read_link(current)
        if before != name:
            if current.is_dir() and not current.is_symlink():
                raise InputError(f"{current} is a folder and no link of ours; give another --dest")
            fresh = self._dest / f".enginery-link-{secrets.token_hex(8)}"
            fresh.symlink_to(name)
            fresh.replace(current)
            sync_folder(self._dest)
        return before

    def _prune(self, current: str, previous: str) -> None:
        """Delete folders that were served before, but the last `keep` of them."""
        found = [path for path in self._dest.iterdir() if path.is_dir() and not path.is_symlink()]
        served = [path for path in found if _FOLDER.fullmatch(path.name) and path.name != current]
        served.sort(key=lambda path: (path.name == previous, path.stat().st_mtime), reverse=True)
        left = [path for path in found if path.name.startswith(_STAGING)]
        for path in served[self._keep :] + left:
            shutil.rmtree(path, ignore_errors=True)

    def _call_hook(self, swap: Swap) -> None:
        """Call the hook for what is served, if it has not succeeded for that before."""
        if self._hook is None:
            return
        marker = self._dest / _HOOKED
        with suppress(OSError):
            if marker.read_text() == swap.folder.name:
                return
        if failure := self._hook(swap.facts()):
            raise HookFailed(f"{failure}; it is called again at the next look")
        write_whole(marker, swap.folder.name.encode())

    def _complain(self, text: str) -> None:
        """Report an error, once for as long as it stays the same."""
        if text != self._complaint:
            served = read_link(self._dest / CURRENT)
            self._say(f"{text}\n{f'keeping {served}' if served else 'nothing is served yet'}")
            self._complaint = text

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with reachable(f"writing {self._dest}"):
            make_folder(self._dest)
            lock = (self._dest / _LOCK).open("ab")
        with lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UnavailableError(f"another process watches into {self._dest}; give another --dest") from error
            yield
