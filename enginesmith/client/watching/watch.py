"""Follows a channel: a server always finds a complete, verified engine, of the version that is promoted.

How engines lie, and what a swap is, says the layout (`layouts.plain`, `layouts.triton`). A registry that is out of
reach, a version without a compatible engine and a failed download change nothing; they are reported, and tried again.
An unchanged channel costs one conditional request.

With a trust policy, the version that is served is checked again at every look (`TrustRecheck`), since keys are revoked
while channels stay. An engine that is trusted no longer is not taken away, because a server has it open: that is
reported, and a file (`distrusted` of the plain layout) says so for as long as it lasts, for readiness probes to find.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from enginesmith.client.fetch import BlobFetcher, Origin
from enginesmith.client.layouts.base import Layout, PlacedFiles, hold, placed_files
from enginesmith.client.layouts.plain import Plain
from enginesmith.client.layouts.ranking import AllGenerations, rank_each
from enginesmith.client.locate import VersionLocator
from enginesmith.client.resolve import Policy
from enginesmith.client.watching.hooks import Hook
from enginesmith.client.watching.looking import INTERVAL_S, keep_looking
from enginesmith.client.watching.reporting import HookFailed, Reporter
from enginesmith.client.watching.trust_recheck import TrustRecheck
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import reachable, write_whole
from enginesmith.registry.versions.lookup import Located, channel_names
from enginesmith.registry.versions.state import Channel


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

    locator: finds versions in the registry; called at each look.  machines: what engines are for; more than one where
    the layout holds several.  interval_s: seconds between looks, as `looking` has them.  keep: number of older folders
    that stay.  say: called with a message when something happens.  reporter: reports to rollouts what is served.

    Raises InputError for a reference that is no channel.
    """

    def __init__(
        self,
        locator: Callable[[], VersionLocator],
        reference: Reference,
        machines: Sequence[Machine] | AllGenerations,
        dest: Path,
        *,
        policy: Policy,
        fetcher: Callable[[], BlobFetcher],
        interval_s: float = INTERVAL_S,
        hook: Hook | None = None,
        keep: int = 2,
        layout: Layout = Plain(),  # noqa: B008 - a frozen value
        say: Callable[[str], object] = print,
        reporter: Reporter | None = None,
    ) -> None:
        if reference.channel is None:
            raise InputError(f"{str(reference)!r} is no channel, and only channels move; give {reference.model}:stable")
        self._locator, self._reference, self._machines, self._policy = locator, reference, machines, policy
        self._fetcher, self._hook, self._keep, self._layout = fetcher, hook, keep, layout
        self._place = layout.at(dest.expanduser().absolute(), reference.model)
        self._interval_s, self._say = interval_s, say
        self._trust_recheck = TrustRecheck(self._place, policy.trust)
        self._followed: Channel | None = None
        self.served: Swap | None = None
        self._files: PlacedFiles | None = None
        self._reporter = reporter
        self._complaint = ""

    def once(self) -> Swap:
        """Look once, and return what is served. Raises what went wrong; `current` then stays as it was."""
        with self.alone():
            return self.look()

    def run(self, stop: Event) -> Swap | None:
        """Look until `stop` is set; return what is served then.

        Raises InputError at the first look, for what will not pass by itself. Later it is reported like any other
        error: a file that somebody is editing must not end the watcher.
        """
        with self.alone():
            keep_looking(self.try_look, stop, self._interval_s)
        return self.served

    def try_look(self) -> bool:
        """`look`, with errors reported; whether there was none. Raises as `run`."""
        try:
            self.look()
        except EnginesmithError as error:
            if self._ends(error):
                raise
            self._complain(str(error))
            return False
        self._complaint = ""
        return True

    def _ends(self, error: EnginesmithError) -> bool:
        """Whether an error will not pass by itself, and nothing was served before it."""
        wrong = isinstance(error, InputError) and not isinstance(error, UnknownNameError)
        return wrong and self.served is None

    def look(self) -> Swap:
        """Swap if the channel moved, and call the hook if it was not called for what is served and is trusted; report
        what came of it, where a rollout asks for that."""
        locator = self._locator()
        try:
            swap = self._try(locator)
        except EnginesmithError as error:
            self._report(locator, error)
            raise
        self._report(locator, None)
        return swap

    def _report(self, locator: VersionLocator, error: EnginesmithError | None) -> None:
        if self._reporter:
            followed = self._followed if error is None else None
            facts = self.served.facts() if self.served else None
            self._reporter.look(locator, self._reference, followed, facts, error)

    def _try(self, locator: VersionLocator) -> Swap:
        try:
            swap = self._follow(locator)
        except EnginesmithError as error:  # about where the channel leads; what is served is another question
            if not self._ends(error):
                self._trust_recheck.check(None if isinstance(error, UnavailableError) else locator.store)
            raise
        self._trust_recheck.check(locator.store)
        self._call_hook(swap)
        return swap

    def _follow(self, locator: VersionLocator) -> Swap:
        """Swap if the channel leads this node elsewhere; bring again what somebody deleted or overwrote."""
        channel = self._read_channel(locator)
        if self._leads_as_before(channel, locator):
            self._followed = channel
        if channel != self._followed or self.served is None or not self._is_there():
            self.served, whole = self._serve(locator.store, locator.locate_in(channel, self._reference))
            # Last, so that whatever fails is tried again, as is an engine that was lost.
            self._followed = channel if whole else None
        return self.served

    def _is_there(self) -> bool:
        """Whether what is served lies where it was placed; where not, that is said, and tried until it does."""
        if self._files is None or self._files.are_there(self._place):
            return True
        self._files = self._followed = None
        self._say(f"what {self._reference} serves was deleted or overwritten, and is brought again")
        return False

    def _leads_as_before(self, channel: Channel, locator: VersionLocator) -> bool:
        """Whether a state changed, and leads this node where it led before, with the same documents: a rollout reaches
        others, or somebody decided something."""
        known, node = self._followed, locator.node
        if known is None:
            return False
        move = channel.served_to(node)
        same = known.snapshots.get(move.manifest) == channel.snapshots.get(move.manifest)
        return same and known.served_to(node) == move

    def _read_channel(self, locator: VersionLocator) -> Channel:
        """The channel's state. Raises UnknownNameError where there is none."""
        model, name = self._reference.model, str(self._reference.channel)
        found = locator.read_channel(model, name)
        if found is None:
            locator.check_registry()
            known = ", ".join(channel_names(locator.store, model)) or "none"
            raise UnknownNameError(f"there is no channel {model}:{name}; there are: {known}")
        return found

    def _serve(self, store: Store, located: Located) -> tuple[Swap, bool]:
        """Download and swap; return what is served then, and whether it is the best engine: False if that is lost."""
        located, rankings = rank_each(store, located, self._machines, self._policy, self._layout, sure=False)
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
        with reachable(f"reading {swap.folder}"):
            self._files = placed_files(self._place, swap.folder)
        self._trust_recheck.note_served(self._place.served(), located.manifest, located.documents)
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
            raise HookFailed(f"{failure}; it is called again at the next look")
        write_whole(marker, swap.identity.encode())

    def _complain(self, text: str) -> None:
        """Report an error, once for as long as it stays the same."""
        if text != self._complaint:
            served = self._place.served()
            self._say(f"{text}\n{f'keeping {served}' if served else 'nothing is served yet'}")
            self._complaint = text

    def alone(self) -> AbstractContextManager[None]:
        """Be the one process that writes at the place. Raises UnavailableError where another one is."""
        return hold(self._place)
