"""The client of serving nodes: resolves which engine a machine can use, downloads it, and follows a channel.

::

    import enginery

    client = enginery.Client("s3://models/registry", policy=enginery.Policy(proven_only=True))
    answer = client.resolve("digits:stable")                  # what fits, best first; why not the others
    pulled = client.pull("digits:stable", "engines/")         # verified, through this machine's cache
    client.watch("digits:stable", "engines/", hook=enginery.Command("systemctl reload server"))

A pull goes through these modules: `client` -> `pull` (which version and engine, its files), which asks
`registry.versions.lookup` (the manifest) and `resolve` (the ranking) -> `fetch` (one blob) -> `registry.store` (cache,
download, a folder or S3).

Imports the standard library alone (the cloud's library when a registry in a bucket is opened): see
docs/guides/client.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Literal

from enginery.client.fetch import BlobFetcher, Progress, silent
from enginery.client.hooks import Command, Hook, Post
from enginery.client.pull import Pulled, download_best, download_each, download_engine, locate_and_rank
from enginery.client.resolve import EngineCandidate, EngineRanking, Policy
from enginery.client.watch import ChannelWatcher, Swap
from enginery.core.errors import InputError
from enginery.core.hardware.machine import AUTO, Machine
from enginery.core.names import parse_reference
from enginery.registry.store.base import Store, open_store
from enginery.registry.store.buckets import SCHEMES
from enginery.registry.store.cache import DEFAULT_BYTES, BlobCache

__all__ = [
    "EngineRanking",
    "EngineCandidate",
    "Client",
    "Command",
    "Machine",
    "Policy",
    "Post",
    "Pulled",
    "Swap",
    "pull",
]


@dataclass(frozen=True)
class Client:
    """A registry, and how its engines come to this machine.

    registry: a path, file://, s3://, gs:// or az:// URI; opened at first use.
    cache: a folder (with `cache_bytes` as its bound); 'auto' is this machine's (ENGINERY_CACHE, ENGINERY_CACHE_BYTES;
    none for a registry on this machine); None is none.
    policy: what is accepted.  rehash: read every file again instead of believing that it was not written since.
    Raises InputError for a registry that is neither text nor a path.
    """

    registry: str | Path
    cache: str | Path | Literal["auto"] | None = AUTO
    policy: Policy = field(default_factory=Policy)
    cache_bytes: int = DEFAULT_BYTES
    rehash: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.registry, str | Path):
            raise InputError(
                f"registry {self.registry!r}: give a path, {SCHEMES}, such as Client('s3://models/registry')"
            )

    def resolve(self, reference: str, machine: Machine | str = AUTO) -> EngineRanking:
        """Rank the engines of 'name', 'name@VERSION' or 'name:CHANNEL' for a machine, with the reasons of rejections.

        machine: a `Machine`, or a target's name ('auto' is this one). Downloads no engine; no compatible engine is no
        error. Raises UnknownNameError for an unknown reference or target.
        """
        return locate_and_rank(self.store, parse_reference(reference), _machine(machine), self.policy)[1]

    def pull(
        self, reference: str, dest: str | Path, *, machine: Machine | str = AUTO, progress: Progress = silent
    ) -> Pulled:
        """Download the best compatible engine into the folder `dest`, verified, with a JSON description beside it.

        progress: called with the downloaded and the total bytes.
        Raises UnknownNameError when no engine is compatible (with each rejection), IntegrityError, UnavailableError.
        """
        located, answer = locate_and_rank(self.store, parse_reference(reference), _machine(machine), self.policy)
        fetcher = self._fetcher(progress)
        return download_best(
            answer, lambda resolution: download_engine(self.store, located, resolution, Path(dest), fetcher)
        )

    def pull_all(
        self, reference: str, dest: str | Path, *, machine: Machine | str = AUTO, progress: Progress = silent
    ) -> list[Pulled]:
        """Download every compatible engine of a version into the folder `dest`, best first, as `pull` does one, with
        its latency on record for machines of this kind: for `enginery.Router`, and with Policy(fallback="onnx") the
        version's graph behind them.

        Raises as `pull`, and IntegrityError for a damaged latency report.
        """
        located, answer = locate_and_rank(self.store, parse_reference(reference), _machine(machine), self.policy)
        return download_each(self.store, located, answer, Path(dest), self._fetcher(progress))

    def watch(
        self,
        reference: str,
        dest: str | Path,
        *,
        machine: Machine | str = AUTO,
        interval_s: float = 30.0,
        hook: Hook | None = None,
        once: bool = False,
        keep: int = 2,
        stop: Event | None = None,
        say: Callable[[str], object] = print,
        progress: Progress = silent,
    ) -> Swap | None:
        """Follow the channel 'name:CHANNEL' until `stop` is set: the link `dest`/current points to its engine's folder.

        See `watch.ChannelWatcher`. once: check once, raise any error, and return what is served.
        """
        watch = ChannelWatcher(
            lambda: self.store,
            parse_reference(reference),
            _machine(machine),
            Path(dest),
            policy=self.policy,
            fetcher=lambda: self._fetcher(progress),
            interval_s=interval_s,
            hook=hook,
            keep=keep,
            say=say,
        )
        return watch.once() if once else watch.run(stop or Event())

    @cached_property
    def store(self) -> Store:
        """The registry, opened. Raises InputError and UnavailableError, and tries again next time."""
        return open_store(self.registry)

    def _fetcher(self, progress: Progress) -> BlobFetcher:
        if self.cache == AUTO:
            return BlobFetcher.for_store(self.store, progress, rehash=self.rehash)
        found = None if self.cache is None else BlobCache(Path(self.cache).expanduser().absolute(), self.cache_bytes)
        return BlobFetcher(found, progress, self.rehash)


def pull(
    reference: str,
    *,
    registry: Path | str,
    dest: Path | str,
    target: Machine | str = AUTO,
    precision: str | None = None,
    proven_only: bool = False,
    fallback: Literal["onnx"] | None = None,
    trust: Path | str | None = None,
    kind: Literal["engine", "cache"] = "engine",
) -> Pulled:
    """Download the best engine for `target` into the folder `dest`, verified, with a JSON description beside it.

    reference: 'name', 'name@VERSION' or 'name:CHANNEL'.  target: 'auto' is this machine.
    trust: a trust policy's file; None is the one that ENGINERY_TRUST_POLICY names, if any.
    kind: 'cache' brings a compile cache of torch, for `enginery.warm_start`.
    Raises UnknownNameError when nothing fits (each rejection with its reason), IntegrityError (UntrustedError without
    the signatures that the trust policy asks for), UnavailableError.
    """
    policy = Policy(precision, proven_only=proven_only, fallback=fallback, kind=kind, trust=trust)
    return Client(registry, policy=policy).pull(reference, dest, machine=target)


def _machine(machine: Machine | str) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise InputError(f"machine {machine!r}: give a Machine, or a target's name such as 'cpu', 'l4' or 'auto'")
    return Machine.from_name(machine)
