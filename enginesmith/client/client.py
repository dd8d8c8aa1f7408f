"""The client of serving nodes: resolves which engine a machine can use, downloads it, and follows a channel.

A pull goes through these modules: `client` asks `locate` (the manifest) and `resolve` (the ranking), and `pull`
downloads the files from `registry.store` (cache, download, a folder or S3). Modules that only layouts, watchers, trust
policies, latency reports and writers need are not loaded.

Imports only the standard library, and the cloud's library when a registry in a bucket is opened: see
docs/guides/client.md.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal

from enginesmith.client.locate import VersionLocator, rank_located
from enginesmith.client.pull import (
    BlobFetcher,
    Progress,
    Pulled,
    download_best,
    download_engine,
    silent,
    with_attachments,
)
from enginesmith.client.resolve import EngineRanking, Policy
from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import AUTO, Machine
from enginesmith.core.names import Reference, parse_reference
from enginesmith.registry.rollouts.rollout_state import ServingNode
from enginesmith.registry.store.base import SCHEMES, Store, open_store, split_places
from enginesmith.registry.versions.lookup import Located

if TYPE_CHECKING:
    from enginesmith.client.layouts.base import AllGenerations, Layout, Placed
    from enginesmith.client.watching.server import Health, Hook, Reporter, ReportUrl
    from enginesmith.client.watching.watch import ChannelWatcher, Swap
    from enginesmith.registry.store.cache import BlobCache


def warn(text: str) -> None:
    """Report an unreachable place with Python's `warnings`."""
    warnings.warn(text, stacklevel=3)


@dataclass(frozen=True)
class Client:
    """A registry, and settings for downloads from it.

    registry: a path, file://, s3://, gs://, az:// or http:// URI, or several with commas, read from the first that
    answers (`enginesmith.registry.store.nearest`); opened on first use.  say: called when one of several places stops
    answering, or answers again.  cache: a folder (with `cache_bytes` as its limit); 'auto' is this machine's
    (ENGINESMITH_CACHE, ENGINESMITH_CACHE_BYTES; none for a registry on this machine); None means no cache.
    policy: which engines are accepted.  rehash: read every file again instead of trusting its unchanged times.
    node: this node, for rollouts in waves; by default this host (`ServingNode.from_environment`).
    Raises InputError for a registry that is neither text nor a path.
    """

    registry: str | Path
    cache: str | Path | Literal["auto"] | None = AUTO
    policy: Policy = field(default_factory=Policy)
    cache_bytes: int | None = None
    rehash: bool = False
    say: Callable[[str], object] = warn
    node: ServingNode | None = field(default_factory=ServingNode.from_environment)

    def __post_init__(self) -> None:
        if not isinstance(self.registry, str | Path):
            raise InputError(
                f"registry {self.registry!r}: give a path, {SCHEMES}, such as Client('s3://models/registry')"
            )

    def resolve(self, reference: str, target: Machine | str = AUTO) -> EngineRanking:
        """Rank the engines of 'name', 'name@VERSION' or 'name:CHANNEL' for a machine, with the reasons of rejections.

        target: a `Machine`, or a target's name ('auto' is this machine). Downloads no engine; if no engine is
        compatible, the ranking is empty. Raises UnknownNameError for an unknown reference or target.
        """
        return self._rank(reference, target)[1]

    def pull(
        self, reference: str, dest: str | Path, *, target: Machine | str = AUTO, progress: Progress = silent
    ) -> Pulled:
        """Download the best compatible engine into the folder `dest`, verified, with a JSON description beside it, and
        the version's attachments that fit the machine into `dest`/attachments (`pull.with_attachments`).

        progress: called with the downloaded and the total bytes.
        reference: 'name', 'name@VERSION' or 'name:CHANNEL'.
        target: a `Machine`, or a target's name ('auto' is this machine).
        Raises UnknownNameError if no engine is compatible (with each rejection), IntegrityError, UnavailableError.
        """
        located_version, ranking = self._rank(reference, target, sure=False)
        store, fetcher = self._locator.store, self._fetcher(progress)
        pulled_engine = download_best(
            ranking, lambda resolution: download_engine(store, located_version, resolution, Path(dest), fetcher)
        )
        return with_attachments(pulled_engine, store, ranking, Path(dest), fetcher)

    def pull_all(
        self, reference: str, dest: str | Path, *, target: Machine | str = AUTO, progress: Progress = silent
    ) -> list[Pulled]:
        """Download every compatible engine of a version into the folder `dest`, best first, each as in `pull`, with its
        recorded latency on machines of this kind: for `enginesmith.Router`. With Policy(fallback="onnx") the version's
        graph comes last.

        Raises as `pull`, and IntegrityError for a damaged latency report.
        """
        from enginesmith.registry.evidence.latencies import measured_latencies

        located_version, ranking = self._rank(reference, target)
        store, fetcher = self._locator.store, self._fetcher(progress)
        latencies = measured_latencies(located_version.documents or store, located_version.manifest, ranking.machine)
        resolution = ranking.resolution()
        pulled_engines = [
            download_engine(store, located_version, replace(resolution, chosen=engine), Path(dest), fetcher)
            for engine in resolution.ranked
        ]
        return [
            replace(pulled_engine, latency=latencies.get(str(pulled_engine.engine.digest)))
            for pulled_engine in pulled_engines
        ]

    def place(
        self,
        reference: str,
        dest: str | Path,
        layout: "Layout",
        *,
        target: "Machine | str | Sequence[Machine | str] | AllGenerations" = AUTO,
        keep: int = 2,
        progress: Progress = silent,
    ) -> "Placed":
        """Put a version into the folder `dest` in a layout, such as `Triton()`, for one or several machines, as `watch`
        does at each move. target: one or several (each with another compute capability), or ALL_GENERATIONS. keep:
        number of older versions that stay.

        Raises as `pull`, InputError if the layout cannot hold the version, UnavailableError while another process
        writes there.
        """
        from enginesmith.client.layouts.base import hold, rank_each

        store, located_version = self._locator.store, self._locator.locate(parse_reference(reference))
        located_version, rankings = rank_each(store, located_version, _machines(target), self.policy, layout)
        # Before any folder is made.
        layout.check(located_version.manifest, [ranking.resolution().chosen for ranking in rankings])
        place = layout.at(Path(dest).expanduser().absolute(), located_version.manifest.model)
        with hold(place):
            return place.swap(store, located_version, rankings, self._fetcher(progress), keep)

    def watch(
        self,
        reference: str,
        dest: str | Path,
        *,
        target: "Machine | str | Sequence[Machine | str] | AllGenerations" = AUTO,
        layout: "Layout | None" = None,
        interval_s: float | None = None,
        hook: "Hook | None" = None,
        once: bool = False,
        keep: int = 2,
        stop: Event | None = None,
        say: Callable[[str], object] = print,
        progress: Progress = silent,
        health: "Health | None" = None,
        report: "ReportUrl | bool" = True,
    ) -> "Swap | None":
        """Follow the channel 'name:CHANNEL' until `stop` is set: the link `dest`/current points to its engine's folder.

        reference: 'name:CHANNEL'; nothing else can be followed.
        dest: the folder for the engines' folders and the link to the served one.
        target: the machine of the engine; with `Triton()` several, or ALL_GENERATIONS.
        layout: None is a folder for each version; `Triton()` is a model repository of Triton's.
        interval_s: seconds between polls; None is `watching.server.INTERVAL_S`.
        hook: called after each swap: `Command`, `Post`, or a function of the served engine's facts.
        once: poll once, raise any error, and return the served engine.
        keep: number of older folders that stay.
        stop: set by another thread to end this call; None: only an exception, such as Ctrl-C, ends it.
        say: called with a message about each event.
        progress: called with the downloaded and the total bytes.
        health: health check of the server, for rollouts; None: it counts as healthy after each swap.
        report: where the node's reports go; True: to the registry, False: nowhere.
        Raises InputError for a reference that is no channel (`watching.watch.ChannelWatcher`).
        """
        from enginesmith.client.layouts.base import Plain
        from enginesmith.client.watching.server import INTERVAL_S

        watcher = self._watchers(hook, keep, say, progress)(
            parse_reference(reference),
            _machines(target),
            Path(dest),
            layout=layout or Plain(),
            interval_s=INTERVAL_S if interval_s is None else interval_s,
            reporter=_reporter(health, report, say),
        )
        return watcher.once() if once else watcher.run(stop or Event())

    def watch_group(
        self,
        references: Sequence[str],
        dest: str | Path,
        *,
        target: Machine | str = AUTO,
        interval_s: float | None = None,
        hook: "Hook | None" = None,
        once: bool = False,
        keep: int = 2,
        stop: Event | None = None,
        say: Callable[[str], object] = print,
        progress: Progress = silent,
        health: "Health | None" = None,
        report: "ReportUrl | bool" = True,
    ) -> "tuple[Swap, ...]":
        """Follow several channels as `watch` does one, each into `dest`/MODEL/CHANNEL (`watching.watch.GroupWatcher`).

        references: the channels, each as 'name:CHANNEL'.
        target: the machine of all engines.
        interval_s: seconds between polls of all channels; None is `watching.server.INTERVAL_S` times their number.
        hook, once, keep, stop, say, progress, health, report: as in `watch`, for every channel.
        Raises InputError without references.
        """
        from enginesmith.client.watching.watch import GroupWatcher

        machine, watcher = _machine(target), self._watchers(hook, keep, say, progress)

        def make(reference: Reference) -> "ChannelWatcher":
            folder = Path(dest) / reference.model / str(reference.channel)
            return watcher(reference, [machine], folder, reporter=_reporter(health, report, say))

        parsed_references = [parse_reference(reference) for reference in references]
        group = GroupWatcher(parsed_references, make, interval_s=interval_s)
        return group.once() if once else group.run(stop or Event())

    def _watchers(
        self, hook: "Hook | None", keep: int, say: Callable[[str], object], progress: Progress
    ) -> "Callable[..., ChannelWatcher]":
        """`ChannelWatcher`, with the arguments that all channels of a call share."""
        from enginesmith.client.watching.watch import ChannelWatcher

        return partial(
            ChannelWatcher,
            lambda: self._locator,
            policy=self.policy,
            fetcher=lambda: self._fetcher(progress),
            hook=hook,
            keep=keep,
            say=say,
        )

    @cached_property
    def store(self) -> Store:
        """The opened registry. Raises InputError and UnavailableError; after an error, the next access tries again."""
        return self._open(check=True)

    def _open(self, *, check: bool) -> Store:
        if isinstance(self.registry, Path) or len(split_places(self.registry)) == 1:
            return open_store(self.registry, check=check)
        from enginesmith.registry.store.nearest import open_nearest

        return open_nearest(self.registry, self.say)

    @cached_property
    def _locator(self) -> VersionLocator:
        """The locator of versions. It checks whether a bucket is a registry only after a channel was not found."""
        store = self.__dict__.get("store") or self._open(check=False)
        return VersionLocator.for_store(store, self._blob_cache(store), self.node)

    def _rank(self, reference: str, target: Machine | str, *, sure: bool = True) -> tuple[Located, EngineRanking]:
        parsed_reference, machine = parse_reference(reference), _machine(target)
        located_version = self._locator.locate(parsed_reference)
        return rank_located(self._locator.store, located_version, machine, self.policy, sure=sure)

    def _fetcher(self, progress: Progress) -> BlobFetcher:
        return BlobFetcher(self._blob_cache(self._locator.store), progress, self.rehash)

    def _blob_cache(self, store: Store) -> "BlobCache | None":
        if self.cache is None or (self.cache == AUTO and store.near):
            return None
        from enginesmith.registry.store.cache import DEFAULT_BYTES, BlobCache, local_cache

        if self.cache == AUTO:
            return local_cache()
        return BlobCache(Path(self.cache).expanduser().absolute(), self.cache_bytes or DEFAULT_BYTES)


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
    allow_unsigned: bool = False,
) -> Pulled:
    """Download the best engine for `target` into the folder `dest`, verified, with a JSON description beside it.

    reference: 'name', 'name@VERSION' or 'name:CHANNEL'.
    registry: as in `Client`.
    target: a `Machine`, or a target's name; 'auto' is this machine.
    precision: only engines of this precision, as 'int8'; None means any.
    proven_only: only engines proven on real inputs on this kind of machine.
    fallback: 'onnx' downloads the version's ONNX model if no engine fits; None raises an error.
    trust: a trust policy's file; None is the one in ENGINESMITH_TRUST_POLICY, if any.
    allow_unsigned: as in `Policy`, for attachments that are code.
    Raises UnknownNameError if no engine fits (each rejection with its reason), IntegrityError (UntrustedError without
    the signatures that the trust policy requires), UnavailableError.
    """
    policy = Policy(precision, proven_only=proven_only, fallback=fallback, trust=trust, allow_unsigned=allow_unsigned)
    return Client(registry, policy=policy).pull(reference, dest, target=target)


def _machines(
    targets: "Machine | str | Sequence[Machine | str] | AllGenerations",
) -> "tuple[Machine, ...] | AllGenerations":
    from enginesmith.client.layouts.base import AllGenerations

    if isinstance(targets, AllGenerations):
        return targets
    target_list = targets if isinstance(targets, Sequence) and not isinstance(targets, str) else (targets,)
    if not target_list:
        raise InputError("no target: give a Machine, or a target's name such as 'cpu', 'l4' or 'auto'")
    return tuple(_machine(target) for target in target_list)


def _machine(target: Machine | str) -> Machine:
    if isinstance(target, Machine):
        return target
    if not isinstance(target, str):
        raise InputError(f"target {target!r}: give a Machine, or a target's name such as 'cpu', 'l4' or 'auto'")
    return Machine.from_name(target)


def _reporter(health: "Health | None", report: "ReportUrl | bool", say: Callable[[str], object]) -> "Reporter | None":
    """The reporter of one channel, which stores its last report."""
    from enginesmith.client.watching.server import Reporter

    return Reporter(None if report is True else report, health, say=say) if report else None
