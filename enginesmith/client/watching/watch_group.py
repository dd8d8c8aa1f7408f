"""Follows several channels at once, each into a folder DEST/MODEL/CHANNEL of its own.

A look is a conditional request for each channel, and the interval is as many times longer, so that a node sends no more
of them than one that follows a single channel.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Event

from enginesmith.client.watching.looking import INTERVAL_S, keep_looking
from enginesmith.client.watching.watch import ChannelWatcher, Swap
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.names import Reference


class GroupWatcher:
    """Follows channels. references: which.  make: a channel's watcher.  interval_s: seconds between two looks; None:
    `INTERVAL_S` for each channel. Raises InputError without references."""

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
        """Look once at each channel; return what is served. Raises the first error, after all were looked at."""
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
        """Look until `stop` is set; return what is served then. Raises as `ChannelWatcher.run`."""
        with self._alone():
            keep_looking(self._look, stop, self._interval_s)
        return tuple(watcher.served for watcher in self._watchers if watcher.served is not None)

    def _look(self) -> bool:
        """Look at each channel, and report errors; whether there were none."""
        looked = [watcher.try_look() for watcher in self._watchers]
        return all(looked)

    def _alone(self) -> ExitStack:
        """Be the one process that writes at the places. Raises UnavailableError where another one is."""
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.alone())
            return stack.pop_all()
