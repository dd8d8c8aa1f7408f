"""The documents and lists that a cache keeps in memory: for some seconds they are served without asking the registry.

After that one conditional request asks whether they changed, however many nodes want to know. While the registry is out
of reach, what is known is served for a while longer, and said to be stale. What is absent is remembered like the rest.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from enginesmith.registry.store.base import Store
from pipeline.cache_server.counts import CacheCounts
from pipeline.cache_server.origin import NotServedError, Origin, SingleFlight
from pipeline.cache_server.served import Listing

# Asks a store for a document with the tag that is known, and gives what `Store.read_if_changed` does.
Ask = Callable[[Store, str], tuple[bytes | None, str]]

# Of all documents together.
_MOST_BYTES = 256 << 20
# What a document takes beside its bytes.
_OVERHEAD_BYTES = 1024
# How long a request waits for the registry where it can be answered with what is known.
_PATIENCE_S = 2.0
# How long a registry that did not answer is not asked again.
_AWAY_S = 5.0
# Keys in one list; more are a registry's to list, not a cache's.
_MOST_KEYS = 100_000


@dataclass(frozen=True)
class KeptDocument:
    """A document as it was when the registry was last asked. data: None: absent.  tag: the registry's own.

    etag: of the bytes, so that caches side by side give the same.  asked: when, in seconds of the loop's clock.
    stale: whether the registry was out of reach since.
    """

    data: bytes | None
    etag: str
    tag: str
    asked: float
    stale: bool = False


class Documents:
    """fresh_s: how long a document is served without asking.  offline_s: that, while the registry is out of reach."""

    def __init__(self, origin: Origin, counts: CacheCounts, fresh_s: float, offline_s: float) -> None:
        self._origin, self._counts = origin, counts
        self._fresh_s, self._offline_s = fresh_s, max(fresh_s, offline_s)
        self._kept: OrderedDict[str, KeptDocument] = OrderedDict()
        self._bytes, self._away_until = 0, 0.0
        self._questions = SingleFlight[tuple[KeptDocument, bool]]()

    async def read(self, key: str) -> tuple[KeptDocument, str]:
        """A document and how it was answered: 'hit', 'miss', 'stale' or 'absent'. Raises NotServedError."""

        def ask(store: Store, tag: str) -> tuple[bytes | None, str]:
            return store.read_if_changed(key, tag)

        return await self._answer("document", key, ask)

    async def list(self, prefix: str, listing: Listing) -> tuple[KeptDocument, str]:
        """The keys below a prefix, or the names directly below it, as a JSON document; as `read`."""

        def ask(store: Store, _tag: str) -> tuple[bytes | None, str]:
            names = []
            for name in store.list(prefix) if listing == "keys" else store.children(prefix):
                names.append(name)
                if len(names) > _MOST_KEYS:
                    raise NotServedError(413, f"over {_MOST_KEYS} keys, which a cache does not list; ask the registry")
            return json.dumps(names).encode(), "listed"

        return await self._answer("list", f"{prefix}?{listing}", ask)

    async def _answer(self, kind: str, name: str, ask: Ask) -> tuple[KeptDocument, str]:
        known = self._kept.get(name)
        if known is not None and self._age(known) < self._fresh_s:
            self._kept.move_to_end(name)
            return known, "absent" if known.data is None else "hit"
        if known is not None and self._age(known) <= self._offline_s and self._now() < self._away_until:
            return replace(known, stale=True), "stale"
        question = self._questions.once(name, lambda: self._ask(kind, name, known, ask))
        try:
            found, changed = await asyncio.wait_for(
                question, _PATIENCE_S if known is not None and self._age(known) <= self._offline_s else None
            )
        except TimeoutError:  # the question goes on
            assert known is not None  # noqa: S101 - there is no limit without it
            return replace(known, stale=True), "stale"
        return found, "stale" if found.stale else "absent" if found.data is None else "miss" if changed else "hit"

    async def _ask(self, kind: str, name: str, known: KeptDocument | None, ask: Ask) -> tuple[KeptDocument, bool]:
        """The document as the registry has it now, and whether its bytes came."""
        now = self._now()
        tag = known.tag if known is not None and known.data is not None else ""
        try:
            data, tag = await self._origin.ask(kind, lambda store: ask(store, tag))
        except NotServedError as error:
            if error.status == 503:
                self._away_until = self._now() + _AWAY_S
            if known is None or error.status != 503 or self._age(known) > self._offline_s:
                raise
            return replace(known, stale=True), False
        if data is None and tag and known is not None:
            found = replace(known, asked=now)
        else:
            found = KeptDocument(data, f'"{hashlib.sha256(data or b"").hexdigest()}"', tag, now)
        self._keep(name, found)
        return found, data is not None

    def _keep(self, name: str, found: KeptDocument) -> None:
        self._bytes += _size(found) - _size(self._kept.pop(name, None))
        self._kept[name] = found
        while self._bytes > _MOST_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])

    def _age(self, known: KeptDocument) -> float:
        return self._now() - known.asked

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _size(document: KeptDocument | None) -> int:
    return 0 if document is None else len(document.data or b"") + _OVERHEAD_BYTES
