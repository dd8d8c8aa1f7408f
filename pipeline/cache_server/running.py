"""The process of a cache: listens, serves until it is told to end, and then lets what is being sent come to its end."""

import asyncio
import logging
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.registry.store.base import absolute_uri
from enginesmith.registry.store.cache import BlobCache
from enginesmith.registry.store.files import reachable
from enginesmith.registry.store.layout import MARKER
from pipeline.cache_server.application import CacheApplication
from pipeline.cache_server.blobs import Blobs
from pipeline.cache_server.counts import CacheCounts
from pipeline.cache_server.documents import Documents
from pipeline.cache_server.origin import Origin
from pipeline.cache_server.served import ServedKeys

# Connections that wait to be accepted: 200 nodes with four connections each may come at the same moment.
_BACKLOG = 1024
# How long a connection without a request is kept: longer than nodes wait between two looks at a channel.
_IDLE_S = 75.0


@dataclass(frozen=True)
class CacheSettings:
    """registry: what is cached.  folder: where blobs are kept, of at most `limit_bytes`.  port: 0 is any free one.

    fresh_s, offline_s: as in `Documents`.  token_file: as in `CacheApplication`.  also: as in `ServedKeys`.
    grace_s: how long downloads may take that run when the process is told to end.
    """

    registry: str
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    limit_bytes: int = 100 << 30
    fresh_s: float = 5.0
    offline_s: float = 3600.0
    grace_s: float = 30.0
    token_file: Path | None = None
    also: Sequence[str] = ()


def serve(settings: CacheSettings, say: Callable[[str], object], announce: Callable[[str], object]) -> None:
    """Serve until SIGTERM or SIGINT. announce: called with the URL once it answers.

    Raises InputError for a registry's URI that cannot be one, UnavailableError where it cannot listen or write.
    """
    absolute_uri(settings.registry)
    if (settings.folder / MARKER).exists():
        raise InputError(f"{settings.folder} is a registry; give the cache a folder of its own with --dir")
    with reachable(f"making the cache's folder {settings.folder}"):
        (settings.folder / "blobs").mkdir(parents=True, exist_ok=True)
        (settings.folder / "locks").mkdir(exist_ok=True)
        with (settings.folder / "locks" / "000").open("ab"):
            pass
    if settings.token_file is not None:
        _check_token(settings.token_file)
    _raise_open_files()
    # What goes wrong with a request is said to who sent it; aiohttp would write a traceback for a malformed one.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    asyncio.run(_serve(settings, say, announce))


async def _serve(settings: CacheSettings, say: Callable[[str], object], announce: Callable[[str], object]) -> None:
    counts = CacheCounts()
    origin = Origin(settings.registry, counts, say)
    cache = BlobCache(settings.folder, settings.limit_bytes)
    blobs = Blobs(origin, cache, counts)
    documents = Documents(origin, counts, settings.fresh_s, settings.offline_s)
    served = ServedKeys(tuple(settings.also))
    counts.watch_disk(settings.folder / "blobs", settings.limit_bytes)
    application = CacheApplication(documents, blobs, served, counts, settings.token_file)
    runner = web.AppRunner(
        application.build(), access_log=None, shutdown_timeout=settings.grace_s, keepalive_timeout=_IDLE_S
    )
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        announce(await _listen(runner, settings))
        asking = asyncio.create_task(_tell_absence(origin, say))
        await stop.wait()
        asking.cancel()
        application.ending = True
        say("ending: no more connections are taken, and what is being sent is sent")
    finally:
        await runner.cleanup()
        blobs.stop()
        origin.close()


async def _tell_absence(origin: Origin, say: Callable[[str], object]) -> None:
    """Say why the registry cannot be read now, if so: a cache starts without it, and asks again with every request."""
    try:
        await origin.run(lambda: origin.store().read(MARKER))
    except EnginesmithError as error:
        say(f"{error}; until then requests for what is not kept are refused")


async def _listen(runner: web.AppRunner, settings: CacheSettings) -> str:
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG).start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnavailableError(
            f"listening on {settings.host}:{settings.port}: {reason}; give another address with --listen"
        ) from error
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _check_token(path: Path) -> None:
    with reachable(f"reading the token file {path}"):
        token = path.read_bytes().strip()
    if not token or not token.isascii() or b" " in token or b"\n" in token:
        raise InputError(f"{path} holds no token; write one line of letters, digits and signs")


def _raise_open_files() -> None:
    """Allow as many open files as the machine does: each connection is one, and each download another."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
