"""Watches a place for specs, and sends events to Prefect."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, RelatedResource, Resource
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from enginesmith.core.errors import EnginesmithError, UnavailableError, digest_of, digest_of_file
from enginesmith.registry.builds.build_history import hold_build_lock
from enginesmith.registry.registered_specs import Registration, registrations
from enginesmith.registry.rollouts.rollout_state import Rollout
from enginesmith.registry.store.base import Store
from pipeline.canary.automatic import CanaryRequest
from pipeline.intake.registration import Place, bundle_of, named_files, place_at, register
from pipeline.orchestration.artifacts import api_problem, error_text
from pipeline.orchestration.catalog import spec_files, without_graphs
from pipeline.orchestration.gpu_workers import (
    ADVANCED,
    DONE,
    HALTED,
    JUDGED,
    PUBLISHED,
    REGISTERED,
    check_payload,
    remember_sent,
    was_sent,
)
from pipeline.spec.ensembles.model import load_any
from validation.canary.report import CanaryReport

# Sends events to a Prefect server, whose automations start the next step on them.
#
# Each event is about one model, as the resource `enginesmith.model.NAME`. Its payload names things by digest and by the
# registry's URI, which never holds credentials. An event counts as sent once the server has answered.


@dataclass(frozen=True)
class SentEvent:
    """An event that the Prefect server has accepted. id: the server's id of it.  server: URL of the API."""

    id: str
    event: str
    server: str


def send_registered(store: Store, registration: Registration) -> SentEvent:
    """Send that a spec was registered. Raises UnavailableError."""
    payload = {
        "spec": registration.address,
        "digest": registration.bundle.digest,
        "registry": store.uri,
        "by": registration.by,
    }
    return send_event(REGISTERED, registration.bundle.model, payload)


def send_judged(store: Store, request: CanaryRequest, report: CanaryReport, blob: str) -> SentEvent:
    """Send the verdict of a canary of a version on a target, against what a channel serves. blob: digest of the report.
    store: the registry.  request: what was run. Raises UnavailableError."""
    fields = {"version": request.version, "channel": request.channel, "target": str(report.target)}
    payload = {**fields, "verdict": report.verdict, "report": blob, "registry": store.uri}
    return send_event(JUDGED, request.model, payload)


def send_rollout(rollout: Rollout, action: str, why: str, registry: str) -> SentEvent | None:
    """Send a step of a rollout; None for one without an event. action: as `Advance.action`. Raises UnavailableError."""
    events = {"wave": ADVANCED, "halted": HALTED, "aborted": HALTED, "done": DONE}
    if action not in events:
        return None
    fields = {"version": rollout.version, "channel": rollout.channel, "rollout": rollout.id, "wave": rollout.wave + 1}
    return send_event(events[action], rollout.model, {**fields, "why": why, "registry": registry})


def send_published_once(store: Store, model: str, version: str, manifest: str) -> SentEvent | None:
    """Send that a version was published, unless that was sent before; None then. manifest: its digest.

    Of several runs that end with the same version at once, one sends it. Raises UnavailableError.
    """
    with hold_build_lock(
        store, digest_of({"telling": PUBLISHED, "of": manifest}), f"sending the event of {model}@{version}"
    ):
        if was_sent(store, PUBLISHED, manifest):
            return None
        payload = {"version": version, "manifest": manifest, "registry": store.uri}
        sent_event = send_event(PUBLISHED, model, payload)
        remember_sent(store, PUBLISHED, manifest, sent_event.id)
        return sent_event


def send_event(event: str, model: str, payload: Mapping[str, object]) -> SentEvent:
    """Send an event and wait until the server has taken it. Raises UnavailableError without a server, or when it does
    not answer; ValueError for a payload with other fields than `FIELDS`."""
    check_payload(event, {"model", *payload})
    server_url = PREFECT_API_URL.value()
    if not server_url:
        raise UnavailableError(f"{event} cannot be sent: no Prefect server is configured; set PREFECT_API_URL")
    run = FlowRunContext.get()
    related_resources = []
    if run is not None and run.flow_run is not None:  # the flow run that sends it
        labels = {"prefect.resource.id": f"prefect.flow-run.{run.flow_run.id}", "prefect.resource.role": "flow-run"}
        related_resources = [RelatedResource(labels)]
    prefect_event = Event(
        event=event,
        resource=Resource({"prefect.resource.id": f"enginesmith.model.{model}", "prefect.resource.name": model}),
        related=related_resources,
        payload={"model": model, **payload},
    )
    try:
        with get_client(sync_client=True) as client:
            # Not `emit_event`: a thread sends its queue, and says nothing of events that did not arrive.
            client.request("POST", "/events", json=[prefect_event.model_dump(mode="json")])
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        if problem := api_problem(error, server_url):
            raise UnavailableError(f"{event} was not sent: {problem}") from error
        raise UnavailableError(
            f"{event} did not reach the Prefect server at {server_url} ({error_text(error)}); start it, or "
            "correct PREFECT_API_URL, and run this again"
        ) from error
    return SentEvent(str(prefect_event.id), event, server_url)


# Watching a place for specs: one whose content is new is registered, and its event is sent to Prefect once.
#
# Each poll gathers the specs of the place with the digests of their files. The registry has which events were sent, by
# this watcher or an earlier one. An event that was not, because the watcher was killed or the server was down, is sent
# at the next poll.

# Of a file: size in bytes, time of its last change in ns, inode.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class WatchedSpec:
    """A spec that was registered, or an error. said: the spec or the error, as text.  told: whether its event was sent
    just now."""

    spec: str
    said: str
    told: bool = False
    digest: str | None = None


@contextmanager
def watch_place(store: Store, name: str, say: Callable[[WatchedSpec], object]) -> Iterator["Watch"]:
    """A watcher of the place of this name. say: called for each spec that is registered or cannot be read, once for
    each reason. Raises InputError as `place_at`."""
    with place_at(name) as specs_place:
        yield Watch(store, specs_place, name, say)


class Watch:
    """Polls a place, as `watch_place` opens it."""

    def __init__(self, store: Store, place: Place, name: str, say: Callable[[WatchedSpec], object]) -> None:
        self._store, self._place, self._name, self._say = store, place, name, say
        self._digests: dict[Path, tuple[Stamp, str]] = {}
        self._before: dict[Path, list[Stamp]] = {}
        self._complaints: dict[str, str] = {}
        self._taken: dict[Path, str] = {}

    def run(self, interval_s: float, stop: threading.Event) -> None:
        """Poll until `stop` is set. If something is unreachable, report it once and poll again."""
        while not stop.is_set():
            try:
                self.look()
                self._complaints.pop(self._name, None)
            except UnavailableError as error:
                self._complain(self._name, str(error))
            stop.wait(interval_s)

    def look(self, *, stable_only: bool = True) -> None:
        """Poll once. stable_only: take a spec only when its files are as they were at the previous poll.

        Raises UnavailableError when the place, the registry or the Prefect server is out of reach.
        """
        self._place.refresh()
        for path in without_graphs(spec_files(self._place.folder)):
            name = path.relative_to(self._place.folder).as_posix()
            try:
                self._take(path, name, stable_only=stable_only)
            except UnavailableError:
                raise
            except EnginesmithError as error:
                self._complain(name, str(error))

    def _take(self, path: Path, name: str, *, stable_only: bool) -> None:
        spec = load_any(path)
        stamps = [_stamp(file) for _, file in sorted(named_files(spec))]
        is_stable = self._before.get(path) == stamps
        self._before[path] = stamps
        if stable_only and not is_stable:
            return
        digest = bundle_of(spec, self._digest).digest
        if self._taken.get(path) == digest:
            return
        entries = registrations(self._store, spec.model)
        # A bundle that was sent before and is not the newest is a change back: it is sent again.
        is_newest = bool(entries) and entries[-1].bundle.digest == digest
        if not (is_newest and was_sent(self._store, REGISTERED, digest)):
            registration, _ = register(self._store, spec)
            sent_event = send_registered(self._store, registration)
            remember_sent(self._store, REGISTERED, registration.bundle.digest, sent_event.id)
            self._say(WatchedSpec(name, f"registered as {registration.address}", True, registration.bundle.digest))
        self._taken[path] = digest
        self._complaints.pop(name, None)

    def _digest(self, path: Path) -> str:
        """A file's digest. The file is read again only when its stamp changed."""
        stamp, digest_entry = _stamp(path), self._digests.get(path)
        if digest_entry is None or digest_entry[0] != stamp:
            digest_entry = self._digests[path] = (stamp, digest_of_file(path))
        return digest_entry[1]

    def _complain(self, name: str, reason: str) -> None:
        if self._complaints.get(name) != reason:
            self._complaints[name] = reason
            self._say(WatchedSpec(name, reason))


def _stamp(path: Path) -> Stamp:
    file_stat = path.stat()
    return file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ino
