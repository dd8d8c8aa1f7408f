"""Follows channels: a server always finds a complete, verified engine of the version that is promoted."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Event

from enginesmith.client.layouts.base import (
    AllGenerations,
    Layout,
    Place,
    PlacedFiles,
    Plain,
    hold,
    placed_files,
    rank_each,
)
from enginesmith.client.locate import VersionLocator
from enginesmith.client.pull import BlobFetcher, Origin
from enginesmith.client.resolve import Policy
from enginesmith.client.watching.server import INTERVAL_S, Hook, HookFailed, Reporter, keep_looking
from enginesmith.core.codec import Excerpt, explain_damage, parse_as
from enginesmith.core.errors import (
    Digest,
    EnginesmithError,
    InputError,
    IntegrityError,
    UnavailableError,
    UnknownNameError,
    UntrustedError,
)
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import TRUST_VARIABLE, Name, Reference
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.files import reachable, write_whole
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import TrustPolicy
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel
from enginesmith.registry.versions.lookup import Located, channel_names

# At every poll, checks again whether the served version is trusted: keys may be revoked while no channel moves.
#
# The signatures are those in the snapshot that the version was resolved with, so a check sends no request: a revoked
# key is removed from the policy, which is read at every check, and a new signature comes with a new snapshot.

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class _Served(Excerpt):
    """The version in a description. manifest: digest of its manifest."""

    model: Name
    version: Name
    manifest: Digest


class TrustRecheck:
    """Rechecks the trust policy for the version that is served at a place. trust: as in `resolve.Policy`; a file is
    read at every check."""

    def __init__(self, place: Place, trust: TrustPolicy | Path | str | None) -> None:
        self._place, self._trust = place, trust
        # The served name, its version, and the documents with which it was resolved; None: those of the registry.
        self.served: tuple[str, Manifest, Documents | None] | None = None

    def check(self, store: Store | None) -> None:
        """Check the served version against the trust policy, and write or delete the mark accordingly.

        store: None while the registry is unreachable: versions that this process has resolved are checked anyway.
        Raises UntrustedError if it is no longer trusted, or the policy is unreadable; UnknownNameError and
        UnavailableError, which change nothing, if the version cannot be read.
        """
        folder = self._place.served()
        if self._trust is None and not os.environ.get(TRUST_VARIABLE):
            self._write_mark(None)
        elif folder:
            if self.served is None or self.served[0] != folder:
                if store is None:
                    return
                self.served = folder, self._read_served(store), None
            if (documents := self.served[2] or store) is None:
                return
            try:
                require(documents, self.served[1], self._trust)
            except (UntrustedError, InputError) as error:
                reason = f"NO LONGER TRUSTED, but still served: {error}"
                self._write_mark(f"{reason}\n".encode())
                mark_path = self._place.file("distrusted")
                raise UntrustedError(f"{reason}\n{mark_path} is deleted once a trusted version is served") from error
            self._write_mark(None)

    def _read_served(self, store: Store) -> Manifest:
        """The served version's manifest, read from the registry."""
        folder = self._place.file("lock").parent
        with reachable(f"reading {folder}"):
            path = self._place.description()
            description_bytes = path.read_bytes() if path else b""
        remedy = f"so the served version is unknown: delete {self._place.served()} there; a successful poll pulls again"
        with explain_damage(f"{folder} has no description that can be read", remedy):
            description = parse_as(description_bytes, _MAX_BYTES, _Served)
        manifest = lookup.load(store, description.model, description.version)
        if manifest.digest != description.manifest:
            raise IntegrityError(
                f"{path} is of {description.model}@{description.version} with manifest {description.manifest}, but "
                f"the manifest is now {manifest.digest}: it was replaced by hand; run `enginesmith registry fsck`"
            )
        return manifest

    def _write_mark(self, content: bytes | None) -> None:
        """Write the mark with this content, or delete it (None); writes nothing if nothing changes."""
        present_content, mark_path = None, self._place.file("distrusted")
        with suppress(OSError):
            present_content = mark_path.read_bytes()
        if content != present_content:
            with reachable(f"writing {mark_path}"):
                write_whole(mark_path, content) if content is not None else mark_path.unlink(missing_ok=True)


# Follows a channel: a server always finds a complete, verified engine, of the version that is promoted.
#
# The layout (`layouts.base`, `layouts.triton`) determines where engines are, and how a swap works. A registry that is
# unreachable, a version without a compatible engine and a failed download change nothing; they are reported, and tried
# again. An unchanged channel costs one conditional request.
#
# With a trust policy, the served version is checked again at every poll (`TrustRecheck`), since keys may be revoked
# while no channel moves. An engine that is no longer trusted is not removed, because a server has it open. This is
# reported, and a file (`distrusted` in the plain layout) exists while this lasts, for readiness probes.


@dataclass(frozen=True)
class Swap:
    """The served engine. folder: of the engine.  current: the path that leads to it.  previous: name of the earlier
    folder, or ''.

    swapped: whether this poll changed it.  origin: the source of the engine's bytes.  identity: as in `Placed`.
    model, version, channel: of the engine, and the channel that leads to it.  digest: of the engine.  unit: of each
    engine.  machine: the machine that each was chosen for.
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
    unit: str = ""
    machine: str = ""

    def facts(self) -> dict[str, str]:
        """The facts that hooks get, as text by name."""
        omitted_names = ("swapped", "origin", "identity", "unit", "machine")
        return {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name not in omitted_names}


class ChannelWatcher:
    """Follows one channel into one folder.

    locator: finds versions in the registry; called at each poll.  machines: of the engines; more than one if the layout
    holds several.  interval_s: seconds between polls.  keep: number of older folders that stay.  say: called with a
    message about each event.  reporter: reports the served engine.

    reference: the channel.  dest: the folder. policy: which engines are accepted.  fetcher: makes the downloader of
    files.  hook: called after each swap with the served engine's facts, or None.  layout: of the engines.

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
            raise InputError(
                f"{str(reference)!r} is not a channel; only channels can be followed; give {reference.model}:stable"
            )
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
        """Poll once, and return the served engine. Raises on errors; `current` is then unchanged."""
        with self.alone():
            return self.look()

    def run(self, stop: Event) -> Swap | None:
        """Poll until `stop` is set; return the served engine.

        Raises InputError at the first poll, for errors that only a user can remedy. Later it is reported like other
        errors: a file that somebody is editing must not end the watcher.
        """
        with self.alone():
            keep_looking(self.try_look, stop, self._interval_s)
        return self.served

    def try_look(self) -> bool:
        """Call `look`, and report its errors. Returns whether it succeeded. Raises as `run`."""
        try:
            self.look()
        except EnginesmithError as error:
            if self._ends(error):
                raise
            message = str(error)
            if message != self._complaint:
                folder = self._place.served()
                self._say(f"{message}\n{f'keeping {folder}' if folder else 'nothing is served yet'}")
                self._complaint = message
            return False
        self._complaint = ""
        return True

    def _ends(self, error: EnginesmithError) -> bool:
        """Whether an error ends the watcher: only a user can remedy it, and nothing was served before it."""
        is_wrong_input = isinstance(error, InputError) and not isinstance(error, UnknownNameError)
        return is_wrong_input and self.served is None

    def look(self) -> Swap:
        """Swap if the channel moved, call the hook if it is due and the served engine is trusted, and report."""
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
            channel, swap = self._followed if error is None else None, self.served
            swap_fields = {**swap.facts(), "unit": swap.unit, "machine": swap.machine} if swap else {}
            self._reporter.look(locator, self._reference, channel, swap_fields, error)

    def _try(self, locator: VersionLocator) -> Swap:
        try:
            swap = self._follow(locator)
        except EnginesmithError as error:  # about the channel's version, not the served one
            if not self._ends(error):
                self._trust_recheck.check(None if isinstance(error, UnavailableError) else locator.store)
            raise
        self._trust_recheck.check(locator.store)
        self._call_hook(swap)
        return swap

    def _follow(self, locator: VersionLocator) -> Swap:
        """Swap if the channel gives this node another version; restore files that somebody deleted or overwrote."""
        model, name = self._reference.model, str(self._reference.channel)
        channel = locator.read_channel(model, name)
        if channel is None:
            locator.check_registry()
            channel_list = ", ".join(channel_names(locator.store, model)) or "none"
            raise UnknownNameError(f"there is no channel {model}:{name}; there are: {channel_list}")
        if self._leads_as_before(channel, locator):
            self._followed = channel
        if channel != self._followed or self.served is None or not self._is_there():
            self.served, is_best = self._serve(locator.store, locator.locate_in(channel, self._reference))
            # Set last: the next poll tries again after a failure, and if a better engine was lost.
            self._followed = channel if is_best else None
        return self.served

    def _is_there(self) -> bool:
        """Whether the served engine's files exist. If not, this is reported, and downloads are retried."""
        if self._files is None or self._files.are_there(self._place):
            return True
        self._files = self._followed = None
        self._say(f"the files of {self._reference} were deleted or overwritten; pulling them again")
        return False

    def _leads_as_before(self, channel: Channel, locator: VersionLocator) -> bool:
        """Whether a changed state gives this node the same version with the same documents: a rollout reached others,
        or somebody recorded a decision."""
        previous_channel, node = self._followed, locator.node
        if previous_channel is None:
            return False
        move = channel.served_to(node)
        is_same_snapshot = previous_channel.snapshots.get(move.manifest) == channel.snapshots.get(move.manifest)
        return is_same_snapshot and previous_channel.served_to(node) == move

    def _serve(self, store: Store, located: Located) -> tuple[Swap, bool]:
        """Download and swap. Returns the served engine, and whether it is the best one (False if that is lost)."""
        located, rankings = rank_each(store, located, self._machines, self._policy, self._layout, sure=False)
        placement = self._place.swap(store, located, rankings, self._fetcher(), self._keep)
        first_engine = placement.pulled[0]
        swap = Swap(
            model=located.manifest.model,
            version=located.manifest.version,
            channel=str(self._reference.channel),
            digest=str(first_engine.engine.digest),
            folder=placement.folder,
            engine=placement.folder / first_engine.path.name,
            description=placement.folder / first_engine.description.name,
            current=placement.current,
            previous=placement.previous,
            swapped=placement.swapped,
            origin=first_engine.origin,
            identity=placement.identity,
            unit="; ".join(pulled_engine.engine.unit for pulled_engine in placement.pulled),
            machine="; ".join(
                ", ".join([ranking.machine.name, *map(" ".join, ranking.machine.list_facts().items())])
                for ranking in rankings
            ),
        )
        with reachable(f"reading {swap.folder}"):
            self._files = placed_files(self._place, swap.folder)
        self._trust_recheck.served = self._place.served(), located.manifest, located.documents
        if swap.swapped:
            unit_list = ", ".join(
                f"{pulled_engine.engine.unit} ({pulled_engine.origin})" for pulled_engine in placement.pulled
            )
            self._say(f"{swap.model}:{swap.channel} now serves version {swap.version}: {unit_list}")
            for line in (line for pulled_engine in placement.pulled for line in pulled_engine.warnings):
                self._say(line)
        return swap, placement.whole

    def _call_hook(self, swap: Swap) -> None:
        """Call the hook for the served engine, unless it has already succeeded for it."""
        if self._hook is None:
            return
        marker_path = self._place.file("hooked")
        with suppress(OSError):
            if marker_path.read_text() == swap.identity:
                return
        if failure := self._hook(swap.facts()):
            raise HookFailed(f"{failure}; the hook is called again at the next poll")
        write_whole(marker_path, swap.identity.encode())

    def alone(self) -> AbstractContextManager[None]:
        """Hold the place's lock, so that only one process writes there. Raises UnavailableError if another holds it."""
        return hold(self._place)


# Follows several channels at once, each into its own folder DEST/MODEL/CHANNEL.
#
# Each poll sends a conditional request per channel. The default interval is multiplied by the number of channels, so a
# node sends as many requests as one that follows a single channel.


class GroupWatcher:
    """Follows channels. references: the channels.  make: creates a channel's watcher.  interval_s: seconds between
    polls; None: `INTERVAL_S` for each channel. Raises InputError without references."""

    def __init__(
        self,
        references: Sequence[Reference],
        make: Callable[[Reference], ChannelWatcher],
        *,
        interval_s: float | None = None,
    ) -> None:
        if not references:
            raise InputError("nothing to follow: give channels, as in digits:stable")
        self._watchers = [make(reference) for reference in dict.fromkeys(references)]
        self._interval_s = INTERVAL_S * len(self._watchers) if interval_s is None else interval_s

    def once(self) -> tuple[Swap, ...]:
        """Poll each channel once, and return the served engines. Raises the first error after all polls."""
        errors: list[EnginesmithError] = []
        swaps: list[Swap] = []
        with self._alone():
            for watcher in self._watchers:
                try:
                    swaps.append(watcher.look())
                except EnginesmithError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return tuple(swaps)

    def run(self, stop: Event) -> tuple[Swap, ...]:
        """Poll until `stop` is set; return the served engines. Raises as `ChannelWatcher.run`."""
        with self._alone():
            keep_looking(self._look, stop, self._interval_s)
        return tuple(watcher.served for watcher in self._watchers if watcher.served is not None)

    def _look(self) -> bool:
        """Poll each channel, and report errors; return whether there were none."""
        successes = [watcher.try_look() for watcher in self._watchers]
        return all(successes)

    def _alone(self) -> ExitStack:
        """Hold all places' locks, so that only one process writes. Raises UnavailableError if another holds one."""
        with ExitStack() as exit_stack:
            for watcher in self._watchers:
                exit_stack.enter_context(watcher.alone())
            return exit_stack.pop_all()
