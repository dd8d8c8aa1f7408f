"""Reads a feed: one conditional request, and after a change the shards that changed."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from enginesmith.client.locate import VersionLocator
from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.store.layout import feed_key
from enginesmith.registry.versions.feeds import MAX_SHARD_BYTES, Feed, parse_feed, parse_shard, read_feed
from enginesmith.registry.versions.state import Channel

_AT_ONCE = 8


class FeedReader:
    """The states of a feed's channels as they were read last. name: the feed's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._root: tuple[bytes, Feed] | None = None
        self._shards: dict[int, tuple[str, dict[str, Channel]]] = {}

    def read(self, locator: VersionLocator, channels: Collection[str] | None = None) -> dict[str, Channel]:
        """The states of these channels ('digits:stable'), None: of all, that the feed has.

        Raises UnknownNameError where there is no such feed, IntegrityError for a damaged one, InputError for a newer
        format.
        """
        data = locator.memory.read(locator.store, feed_key(self.name))
        if data is None:
            locator.check_registry()
            read_feed(locator.store, self.name)
            raise UnknownNameError(f"there is no feed {self.name!r}")
        if self._root is None or self._root[0] != data:
            feed = parse_feed(data, self.name)
            self._read_shards(locator, feed, channels)
            self._root = data, feed  # last, so that a shard that could not be read is read at the next look
        found = {key: channel for _, part in self._shards.values() for key, channel in part.items()}
        return found if channels is None else {key: found[key] for key in channels if key in found}

    def _read_shards(self, locator: VersionLocator, feed: Feed, channels: Collection[str] | None) -> None:
        numbers = range(len(feed.shards)) if channels is None else {feed.shard_of(channel) for channel in channels}
        known = dict(self._shards.values())
        fresh = [feed.shards[n] for n in numbers if feed.shards[n] and feed.shards[n] not in known]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            known |= zip(
                fresh,
                pool.map(lambda digest: parse_shard(locator.read_blob(digest, MAX_SHARD_BYTES)), fresh),
                strict=True,
            )
        self._shards = {n: (feed.shards[n], known[feed.shards[n]]) for n in numbers if feed.shards[n]}
