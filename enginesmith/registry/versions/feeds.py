"""Feeds: where the channels of a group lead, so that one conditional request follows any number of channels.

A feed is a small root, which names the channels by patterns and the shards by digest, and shards, which are blobs of
states. A channel that moves changes its shard and the root; who follows it reads the root and that shard. Channels
are spread over the shards by a hash of their names; shards are split when they grow.

A feed repeats the states of its channels, and is written after them by whoever changed one. Where a writer is killed
in between, it is late: the controller of rollouts and `verify --repair` write it, and nodes read each channel beside it
now and then. Of two states the newer one stays.
"""

import fnmatch
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

from enginesmith.core.codec import NewerFormatError, encode, parse_as
from enginesmith.core.constraints import Format
from enginesmith.core.digest import canonical_json, digest_of_bytes, is_digest
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.names import check_feed, is_name
from enginesmith.core.parsing import Malformed
from enginesmith.registry.leases import Guard, hold_lease
from enginesmith.registry.store.base import Documents, Store, change
from enginesmith.registry.store.layout import FEEDS, MODELS, feed_key
from enginesmith.registry.store.layout import FORMAT as REGISTRY_FORMAT
from enginesmith.registry.versions.lookup import channel_names
from enginesmith.registry.versions.state import Channel, read_channel

FORMAT = 1
MAX_BYTES = 4 << 20
MAX_SHARD_BYTES = 16 << 20
# A shard is split when it has more channels than this; of a new feed it has at most three quarters of it on average.
# Every reader of a feed reads the root after each change, and few of them the shard, so that fewer shards are better.
MOST_IN_SHARD = 128
MOST_SHARDS = 4096
_PATTERN = re.compile(r"[a-z0-9._*?\[\]!-]{1,128}:[a-z0-9._*?\[\]!-]{1,128}")
_AT_ONCE = 16


@dataclass(frozen=True)
class Feed:
    """The root of a feed. channels: patterns such as 'digits*:stable'.  shards: digest of each, '' for an empty one."""

    name: str
    channels: tuple[str, ...]
    shards: tuple[str, ...] = ("",)
    registry: Annotated[int, Format(REGISTRY_FORMAT)] = REGISTRY_FORMAT
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def covers(self, channel: str) -> bool:
        """Whether a channel ('digits:stable') is one of the feed's."""
        return any(fnmatch.fnmatchcase(channel, pattern) for pattern in self.channels)

    def shard_of(self, channel: str) -> int:
        """The number of the shard that a channel is in."""
        return int(digest_of_bytes(channel.encode())[:8], 16) % len(self.shards)

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        return canonical_json(encode(self))


@dataclass(frozen=True)
class Shard:
    """Some of a feed's channels: their states, in short (`Channel.shorten`)."""

    channels: tuple[Channel, ...] = ()
    format: Annotated[int, Format(FORMAT)] = FORMAT


def parse_feed(data: bytes, name: str) -> Feed:
    """Read the root of a feed. Raises IntegrityError for a damaged one, InputError for one of a newer format."""
    try:
        found = parse_as(data, MAX_BYTES, Feed)
        if found.name != name or not 1 <= len(found.shards) <= MOST_SHARDS:
            raise Malformed("is not the feed its name says, or has no shards")
        if wrong := [digest for digest in found.shards if digest and not is_digest(digest)]:
            raise Malformed(f"shard {wrong[0][:80]!r} is not a digest")
    except NewerFormatError as error:
        raise InputError(f"feed {name!r}: {error}") from error
    except IntegrityError as error:
        raise IntegrityError(f"feed {name!r}: {error}; `enginesmith feed set` writes it anew") from error
    return found


def parse_shard(data: bytes) -> dict[str, Channel]:
    """The channels in a shard's blob, by 'model:channel'. Raises as `parse_feed`."""
    inflated = zlib.decompressobj()
    try:
        text = inflated.decompress(data, MAX_SHARD_BYTES)
    except zlib.error as error:
        raise IntegrityError(f"a feed's shard cannot be decompressed ({error})") from error
    if not inflated.eof:
        raise IntegrityError(f"a feed's shard is cut, or over {MAX_SHARD_BYTES} bytes")
    try:
        shard = parse_as(text, MAX_SHARD_BYTES, Shard)
    except NewerFormatError as error:
        raise InputError(f"a feed's shard: {error}") from error
    return {f"{channel.model}:{channel.name}": channel for channel in shard.channels}


def read_feed(store: Documents, name: str) -> Feed:
    """The root of a feed. Raises UnknownNameError where there is none, and as `parse_feed`."""
    data = store.read(feed_key(name))
    if data is None:
        raise UnknownNameError(f"there is no feed {name!r} in {store.uri}; there are: {_known(store)}")
    return parse_feed(data, name)


def feed_names(store: Documents) -> list[str]:
    """The names of the feeds, sorted."""
    names = (name.removesuffix(".json") for name in store.children(FEEDS) if name.endswith(".json"))
    return [name for name in names if is_name(name)]


def _known(store: Documents) -> str:
    return ", ".join(feed_names(store)) or "none; `enginesmith feed set NAME 'MODEL:CHANNEL'` makes one"


def set_feed(store: Store, name: str, patterns: Sequence[str]) -> tuple[Feed, int]:
    """Make or replace a feed of the channels that match one of `patterns`; return it and the number of its channels.

    Raises InputError for a pattern that is none.
    """
    if wrong := [pattern for pattern in patterns if not _PATTERN.fullmatch(pattern)]:
        raise InputError(f"{wrong[0][:80]!r} is no pattern of channels; give 'MODEL:CHANNEL', as in 'digits*:stable'")
    if not patterns:
        raise InputError(f"feed {name!r} needs a pattern of channels, as in 'digits*:stable', or '*:*' for all")
    check_feed(name)
    counts: list[int] = []
    with hold_lease(store, f"making feed {name}") as guard:

        def make(_: bytes | None) -> bytes:
            # Read after the root was, so that a state that is written meanwhile has this write refused, or is in it.
            channels = _read_channels(store, Feed(name, tuple(patterns)))
            counts.append(len(channels))
            return _sharded(guard, Feed(name, tuple(patterns)), channels).to_bytes()

        return parse_feed(change(store, feed_key(name), make) or b"", name), counts[-1]


def remove_feed(store: Store, name: str) -> None:
    """Delete a feed. Raises UnknownNameError where there is none."""
    if store.read(feed_key(name)) is None:
        raise UnknownNameError(f"there is no feed {name!r}; there are: {_known(store)}")
    store.remove(feed_key(name))


def update_feeds(guard: Guard, channel: Channel) -> None:
    """Put a channel's state into all feeds that cover it. Raises InputError for a feed of a newer format."""
    for name in feed_names(guard.store):
        with suppress(IntegrityError):  # a damaged feed is `verify`'s to tell; the channel's state is written

            def make(data: bytes | None, name: str = name) -> bytes | None:
                feed = None if data is None else parse_feed(data, name)
                return _with_channel(guard, feed, channel) if feed and feed.covers(_named(channel)) else None

            change(guard.store, feed_key(name), make)


def are_feeds_current(store: Store, channel: Channel) -> bool:
    """Whether the feeds that cover a channel have its state, or a newer one; one that is damaged counts as it is.

    An older state that says the same is none: a writer that is late might replace it by one that is older than this.
    """
    for name in feed_names(store):
        with suppress(IntegrityError):
            data = store.read(feed_key(name))
            feed = parse_feed(data, name) if data is not None else None
            if feed and feed.covers(_named(channel)):
                known = read_shard(store, feed.shards[feed.shard_of(_named(channel))]).get(_named(channel))
                if known is None or known.order < channel.order:
                    return False
    return True


def _named(channel: Channel) -> str:
    return f"{channel.model}:{channel.name}"


def _with_channel(guard: Guard, feed: Feed, channel: Channel) -> bytes | None:
    name = _named(channel)
    number = feed.shard_of(name)
    entries = read_shard(guard.store, feed.shards[number])
    known = entries.get(name)
    if known is not None and known.order >= channel.order:
        return None
    entries[name] = channel.shorten()
    if len(entries) > MOST_IN_SHARD and len(feed.shards) < MOST_SHARDS:
        for other, digest in enumerate(feed.shards):
            entries |= read_shard(guard.store, digest) if other != number else {}
        return _sharded(guard, feed, entries, least=2 * len(feed.shards)).to_bytes()
    shards = list(feed.shards)
    (shards[number],) = _write_shards(guard, [entries.values()])
    return replace(feed, shards=tuple(shards)).to_bytes()


def read_shard(store: Store, digest: str) -> dict[str, Channel]:
    """The channels of a shard by its digest; none for ''. Raises IntegrityError for a lost or damaged one."""
    return parse_shard(store.read_blob(digest, MAX_SHARD_BYTES)) if digest else {}


def _sharded(guard: Guard, feed: Feed, channels: Mapping[str, Channel], least: int = 1) -> Feed:
    """The feed with these channels in at least so many shards."""
    count = 1
    while (count < least or 3 * count * MOST_IN_SHARD < 4 * len(channels)) and count < MOST_SHARDS:
        count *= 2
    feed = replace(feed, shards=("",) * count)
    parts: dict[int, list[Channel]] = {}
    for name, channel in channels.items():
        parts.setdefault(feed.shard_of(name), []).append(channel)
    written = dict(zip(parts, _write_shards(guard, parts.values()), strict=True))
    return replace(feed, shards=tuple(written.get(number, "") for number in range(count)))


def _write_shards(guard: Guard, parts: Iterable[Iterable[Channel]]) -> list[str]:
    """The digests of shards of these channels, which are stored, and deleted by no collection while the lease is
    held."""
    ordered = (sorted(part, key=lambda channel: (channel.model, channel.name)) for part in parts)
    blobs = [zlib.compress(canonical_json(encode(Shard(tuple(part)))), 9) for part in ordered]
    digests = [digest_of_bytes(data) for data in blobs]
    guard.secure(digests)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(guard.store.put_bytes, blobs))
    return digests


def _read_channels(store: Store, feed: Feed) -> dict[str, Channel]:
    """The channels that a feed covers, in short; a damaged one is left out."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        models = [name.removesuffix("/") for name in store.children(MODELS) if is_name(name.removesuffix("/"))]
        names = zip(models, pool.map(lambda model: channel_names(store, model), models), strict=True)
        wanted = [(model, name) for model, found in names for name in found if feed.covers(f"{model}:{name}")]
        found = pool.map(lambda pair: _read_sound(store, *pair), wanted)
        return {_named(channel): channel.shorten() for channel in found if channel}


def _read_sound(store: Store, model: str, channel: str) -> Channel | None:
    with suppress(IntegrityError):
        return read_channel(store, model, channel)
    return None


def find_feed_faults(store: Store, name: str) -> list[str]:
    """The channels of a feed that it has in another state than their own, with the reason; or why it cannot be read.

    Raises InputError for a feed of a newer format.
    """
    try:
        feed = read_feed(store, name)
        entries = {key: value for digest in feed.shards for key, value in read_shard(store, digest).items()}
    except IntegrityError as error:
        return [str(error)]
    return [
        f"{key}: has {_describe(entries.get(key))}, and the channel {_describe(channel)}"
        for key, channel in _read_channels(store, feed).items()
        if not ((entry := entries.get(key)) and entry == replace(channel, revision=entry.revision))
    ]


def _describe(channel: Channel | None) -> str:
    if channel is None:
        return "nothing"
    rollout = (
        f", {channel.rollout.version} comes to {', '.join(map(str, channel.rollout.reach))}" if channel.rollout else ""
    )
    return f"version {channel.version}{rollout}"
