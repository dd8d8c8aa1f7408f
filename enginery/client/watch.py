"""Follows a channel: a server always finds a complete, verified engine, of the version that is promoted.

How engines lie, and what a swap is, says the layout (`layouts.plain`, `layouts.triton`). A registry that is out of
reach, a version without a compatible engine and a failed download change nothing; they are reported, and tried again.
An unchanged channel costs one conditional request.

With a trust policy, the version that is served is checked again at every look (`TrustRecheck`), since keys are revoked
while channels stay. An engine that is trusted no longer is not taken away, because a server has it open: that is
reported, and a file (`distrusted` of the plain layout) says so for as long as it lasts, for readiness probes to find.
"""

import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from enginery.client.fetch import BlobFetcher, Origin
from enginery.client.hooks import Hook
from enginery.client.layouts.base import Layout, Place, hold
from enginery.client.layouts.plain import Plain
from enginery.client.layouts.ranking import AllGenerations, rank_each
from enginery.client.resolve import Policy
from enginery.core import parsing
from enginery.core.errors import EngineryError, InputError, IntegrityError, UnavailableError, UnknownNameError
from enginery.core.hardware.machine import Machine
from enginery.core.names import Reference
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.files import reachable, write_whole
from enginery.registry.store.layout import channel_key
from enginery.registry.trust import require
from enginery.registry.trust.policy import VARIABLE, TrustPolicy
from enginery.registry.trust.requirement import UntrustedError
from enginery.registry.versions import lookup
from enginery.registry.versions.lookup import channel_names

_MAX_BYTES = 4 << 20
_JITTER = 0.2


@dataclass(frozen=True)
class Swap:
    """What is served. folder: of the engine.  current: what leads to it.  previous: name of the folder before, or ''.

    swapped: whether this look changed it.  origin: where the engine's bytes came from.  identity: as of `Placed`.
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
    identity: str = ""

    def facts(self) -> dict[str, str]:
        """The facts that hooks get, as text by name."""
        given = ("model", "version", "channel", "digest", "folder", "engine", "description", "current", "previous")
        return {name: str(getattr(self, name)) for name in given}


class ChannelWatcher:
    """Follows one channel into one folder.

    store: opens the registry; called at each look.  machines: what engines are for; more than one where the layout
    holds several.  interval_s: seconds between looks, a fifth more or less at random.
    keep: number of older folders that stay.  say: called with a message when something happens.

    Raises InputError for a reference that is no channel.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        reference: Reference,
        machines: Sequence[Machine] | AllGenerations,
        dest: Path,
        *,
        policy: Policy,
        fetcher: Callable[[], BlobFetcher],
        interval_s: float = 30.0,
        hook: Hook | None = None,
        keep: int = 2,
        layout: Layout = Plain(),  # noqa: B008 - a frozen value
        say: Callable[[str], object] = print,
    ) -> None:
        if reference.channel is None:
            raise InputError(
                f"{reference.model!r} is no channel, and only channels move; give {reference.model}:stable"
            )
        self._store, self._reference, self._machines, self._policy = store, reference, machines, policy
        self._fetcher, self._hook, self._keep, self._layout = fetcher, hook, keep, layout
        self._place = layout.at(dest.expanduser().absolute(), reference.model)
        self._interval_s, self._say = interval_s, say
        self._trust_recheck = TrustRecheck(self._place, policy.trust)
        self._tag = ""
        self._served: Swap | None = None
        self._complaint = ""

    def once(self) -> Swap:
        """Look once, and return what is served. Raises what went wrong; `current` then stays as it was."""
        with hold(self._place):
            return self._look()

    def run(self, stop: Event) -> Swap | None:
        """Look until `stop` is set; return what is served then.

        Raises InputError at the first look, for what will not pass by itself. Later it is reported like any other
        error: a file that somebody is editing must not end the watcher.
        """
        with hold(self._place):
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
        """Swap if the channel moved, and call the hook if it was not called for what is served and is trusted."""
        store = self._store()
        try:
            swap = self._follow(store)
        except EngineryError as error:  # about where the channel leads; what is served is another question
            if not isinstance(error, UnavailableError) and not self._ends(error):
                self._trust_recheck.check(store)
            raise
        self._trust_recheck.check(store)
        self._call_hook(swap)
        return swap

    def _follow(self, store: Store) -> Swap:
        """Swap if the channel moved."""
        channel = str(self._reference.channel)
        data, tag = store.read_if_changed(channel_key(self._reference.model, channel), self._tag)
        if not tag:
            known = ", ".join(channel_names(store, self._reference.model)) or "none"
            raise UnknownNameError(f"there is no channel {self._reference.model}:{channel}; there are: {known}")
        if data is not None or self._served is None:
            self._served, whole = self._serve(store)
            # Last, so that whatever fails is tried again, as is an engine that was lost.
            self._tag = tag if whole else ""
        return self._served

    def _serve(self, store: Store) -> tuple[Swap, bool]:
        """Download and swap; return what is served then, and whether it is the best engine: False if that is lost."""
        located, rankings = rank_each(store, self._reference, self._machines, self._policy, self._layout)
        placed = self._place.swap(store, located, rankings, self._fetcher(), self._keep)
        first = placed.pulled[0]
        swap = Swap(
            model=located.manifest.model,
            version=located.manifest.version,
            channel=str(self._reference.channel),
            digest=str(first.engine.digest),
            folder=placed.folder,
            engine=placed.folder / first.path.name,
            description=placed.folder / first.description.name,
            current=placed.current,
            previous=placed.previous,
            swapped=placed.swapped,
            origin=first.origin,
            identity=placed.identity,
        )
        if swap.swapped:
            units = ", ".join(f"{item.engine.unit} ({item.origin})" for item in placed.pulled)
            self._say(f"{swap.model}:{swap.channel} is {swap.version} now: {units}")
            for line in (line for item in placed.pulled for line in item.warnings):
                self._say(line)
        return swap, placed.whole

    def _call_hook(self, swap: Swap) -> None:
        """Call the hook for what is served, if it has not succeeded for that before."""
        if self._hook is None:
            return
        marker = self._place.hooked
        with suppress(OSError):
            if marker.read_text() == swap.identity:
                return
        if failure := self._hook(swap.facts()):
            raise EngineryError(f"{failure}; it is called again at the next look")
        write_whole(marker, swap.identity.encode())

    def _complain(self, text: str) -> None:
        """Report an error, once for as long as it stays the same."""
        if text != self._complaint:
            served = self._place.served()
            self._say(f"{text}\n{f'keeping {served}' if served else 'nothing is served yet'}")
            self._complaint = text


class TrustRecheck:
    """Rechecks the trust policy for the version that is served at a place. trust: as in `resolve.Policy`; a file is
    read at every check."""

    def __init__(self, place: Place, trust: TrustPolicy | Path | str | None) -> None:
        self._place, self._trust = place, trust
        self._known: tuple[str, Manifest] | None = None

    def check(self, store: Store) -> None:
        """Check the version that is served against the trust policy, and write or delete the mark accordingly.

        Raises UntrustedError when it is trusted no longer, or by a policy that cannot be read; UnknownNameError and
        UnavailableError, which change nothing, when the version cannot be read.
        """
        folder = self._place.served()
        if self._trust is None and not os.environ.get(VARIABLE):
            self._write_mark(None)
        elif folder:
            if self._known is None or self._known[0] != folder:
                self._known = folder, self._read_served(store)
            try:
                require(store, self._known[1], self._trust)
            except (UntrustedError, InputError) as error:
                reason = f"TRUSTED NO LONGER, and still served: {error}"
                self._write_mark(f"{reason}\n".encode())
                raise UntrustedError(f"{reason}\n{self._place.mark} stays there until that changes") from error
            self._write_mark(None)

    def _read_served(self, store: Store) -> Manifest:
        """The manifest, from the registry, of the version that the description of what is served names."""
        place = self._place.lock.parent
        with reachable(f"reading {place}"):
            path = self._place.description()
            data = path.read_bytes() if path else b""
        try:
            description = parsing.parse_json(data, _MAX_BYTES)
            model, version = (parsing.field(description, name, parsing.name) for name in ("model", "version"))
            digest = parsing.field(description, "manifest", parsing.digest)
        except IntegrityError as error:
            raise IntegrityError(
                f"{place} has no description that can be read ({error}), so nobody knows what is served; delete "
                f"{self._place.served()} there, and it is made anew"
            ) from error
        manifest = lookup.load(store, model, version)
        if manifest.digest != digest:
            raise IntegrityError(
                f"{path} is of {model}@{version} with manifest {digest}, and that is now "
                f"{manifest.digest}: it was replaced by hand; run `enginery verify`"
            )
        return manifest

    def _write_mark(self, content: bytes | None) -> None:
        """Write the mark with this content, or delete it (None); nothing is written where it is so already."""
        before, mark = None, self._place.mark
        with suppress(OSError):
            before = mark.read_bytes()
        if content != before:
            with reachable(f"writing {mark}"):
                write_whole(mark, content) if content is not None else mark.unlink(missing_ok=True)
