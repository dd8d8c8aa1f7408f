"""Follows several channels at once, those of a feed or of a list, each into a folder DEST/MODEL/CHANNEL of its own.

With a feed a look is one conditional request, however many channels there are. Without one it is a request for each
channel, and the interval is as many times longer, so that a node sends no more of them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Event

from enginesmith.client.locate import VersionLocator
from enginesmith.client.watching.feed_reader import FeedReader
from enginesmith.client.watching.looking import INTERVAL_S, Wake, keep_looking
from enginesmith.client.watching.watch import ChannelWatcher, Swap
from enginesmith.core.errors import EnginesmithError, InputError, UnknownNameError
from enginesmith.core.names import Reference, parse_reference
from enginesmith.registry.versions.state import Channel

# With a feed, one channel is read by itself every so many looks, in turn: a feed may be late (`versions.feeds`).
LOOKS_A_CHANNEL = 30


class GroupWatcher:
    """Follows channels. references: which; none: all of the feed, also those that come later.  feed: its name, or None.

    make: a channel's watcher.  interval_s: seconds between two looks; None: `INTERVAL_S` for each request of a look.
    Raises InputError without references and feed.
    """

    def __init__(
        self,
        locator: Callable[[], VersionLocator],
        references: Sequence[Reference],
        make: Callable[[Reference], ChannelWatcher],
        *,
        feed: str | None = None,
        interval_s: float | None = None,
        say: Callable[[str], object] = print,
        wake: Wake | None = None,
    ) -> None:
        if not references and feed is None:
            raise InputError(
                "nothing to follow: give channels, as in digits:stable, or a feed (`enginesmith feed list`)"
            )
        self._locator, self._make, self._say, self._wake = locator, make, say, wake
        self._wanted = tuple(str(reference) for reference in references)
        self._reader = FeedReader(feed) if feed is not None else None
        self._interval_s = interval_s
        self._watchers = {str(reference): make(reference) for reference in references}
        self._held: set[str] = set()
        self._looks = 0
        self._complaint = ""

    def once(self) -> tuple[Swap, ...]:
        """Look once at each channel; return what is served. Raises the first error, after all were looked at."""
        with ExitStack() as stack:
            channels = self._read_feed(stack)
            errors: list[EnginesmithError] = []
            swaps: list[Swap] = []
            for name, watcher in self._watchers.items():
                try:
                    swaps.append(watcher.look(channels.get(name)))
                except EnginesmithError as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            return tuple(swaps)

    def run(self, stop: Event) -> tuple[Swap, ...]:
        """Look until `stop` is set; return what is served then. Raises as `ChannelWatcher.run`."""
        with ExitStack() as stack:
            keep_looking(lambda: self._look(stack), stop, self._pause_s, self._wake)
        return tuple(watcher.served for watcher in self._watchers.values() if watcher.served is not None)

    def _look(self, stack: ExitStack) -> bool:
        """Look at each channel, and report errors; whether there were none."""
        try:
            channels = self._read_feed(stack)
            self._complaint = ""
        except EnginesmithError as error:
            if isinstance(error, InputError) and not isinstance(error, UnknownNameError) and not self._held:
                raise
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._say(f"{error}\nkeeping what is served")
            return False
        looked = [watcher.try_look(channels.get(name)) for name, watcher in self._watchers.items()]
        return all(looked)

    def _read_feed(self, stack: ExitStack) -> dict[str, Channel]:
        """The states of the channels by the feed, without the one whose turn it is to be asked for by itself."""
        self._looks += 1
        channels: dict[str, Channel] = {}
        if self._reader is not None:
            try:
                channels = self._reader.read(self._locator(), self._wanted or None)
            except EnginesmithError:  # about where channels lead; what is served is another question
                for watcher in self._watchers.values():
                    watcher.recheck_trust()
                raise
            for name in channels:
                if name not in self._watchers:
                    self._watchers[name] = self._make(parse_reference(name))
        for name, watcher in self._watchers.items():
            if name not in self._held:
                stack.enter_context(watcher.alone())
                self._held.add(name)
        turn, left = divmod(self._looks, LOOKS_A_CHANNEL)
        if left == 0 and self._watchers:
            channels.pop(list(self._watchers)[turn % len(self._watchers)], None)
        return channels

    def _pause_s(self) -> float:
        requests = 1 if self._reader is not None else max(1, len(self._watchers))
        return self._interval_s if self._interval_s is not None else INTERVAL_S * requests
