"""Sends events to a Prefect server, whose automations start the next step on them.

Each event is about one model, as the resource `enginesmith.model.NAME`. Its payload names things by digest and by the
registry's URI, which never holds credentials. An event counts as sent once the server has answered.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, RelatedResource, Resource
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from enginesmith.core.digest import digest_of
from enginesmith.core.errors import UnavailableError
from enginesmith.registry.builds.build_lock import hold_build_lock
from enginesmith.registry.registered_specs import Registration
from enginesmith.registry.rollouts.state import Rollout
from enginesmith.registry.store.base import Store
from pipeline.orchestration.payloads import (
    ADVANCED,
    DONE,
    HALTED,
    JUDGED,
    PAYLOADS,
    PUBLISHED,
    REGISTERED,
    remember_sent,
    was_sent,
)


@dataclass(frozen=True)
class SentEvent:
    """An event that the server has. id: its id there.  server: URL of the API."""

    id: str
    event: str
    server: str


def send_registered(store: Store, item: Registration) -> SentEvent:
    """Send that a spec was registered. Raises UnavailableError."""
    payload = {"spec": item.address, "digest": item.bundle.digest, "registry": store.uri, "by": item.by}
    return send_event(REGISTERED, item.bundle.model, payload)


def send_published(store: Store, model: str, version: str, manifest: str) -> SentEvent:
    """Send that a version was published. manifest: its digest. Raises UnavailableError."""
    return send_event(PUBLISHED, model, {"version": version, "manifest": manifest, "registry": store.uri})


def send_judged(
    store: Store, model: str, version: str, channel: str, target: str, verdict: str, report: str
) -> SentEvent:
    """Send the verdict of a canary of a version on a target, against what a channel serves. report: digest of its blob.
    Raises UnavailableError."""
    about = {"version": version, "channel": channel, "target": target}
    return send_event(JUDGED, model, {**about, "verdict": verdict, "report": report, "registry": store.uri})


def send_rollout(rollout: Rollout, action: str, why: str, registry: str) -> SentEvent | None:
    """Send a step of a rollout; None for one that has no event. action: as `Advance.action`.  why: in words.

    Raises UnavailableError.
    """
    events = {"wave": ADVANCED, "halted": HALTED, "aborted": HALTED, "done": DONE}
    if action not in events:
        return None
    about = {"version": rollout.version, "channel": rollout.channel, "rollout": rollout.id, "wave": rollout.wave + 1}
    return send_event(events[action], rollout.model, {**about, "why": why, "registry": registry})


def send_published_once(store: Store, model: str, version: str, manifest: str) -> SentEvent | None:
    """As `send_published`, unless that was sent before; None then.

    Of several runs that end with the same version at once, one sends it. Raises UnavailableError.
    """
    with hold_build_lock(
        store, digest_of({"telling": PUBLISHED, "of": manifest}), f"sending the event of {model}@{version}"
    ):
        if was_sent(store, PUBLISHED, manifest):
            return None
        sent = send_published(store, model, version, manifest)
        remember_sent(store, PUBLISHED, manifest, sent.id)
        return sent


def send_event(event: str, model: str, payload: Mapping[str, object]) -> SentEvent:
    """Send an event and wait until the server has taken it. Raises UnavailableError without a server, or when it does
    not answer; ValueError for a payload that is not what `PAYLOADS` says."""
    PAYLOADS[event].check(event, {"model", *payload})
    server = PREFECT_API_URL.value()
    if not server:
        raise UnavailableError(f"{event} cannot be sent: no Prefect server is configured; set PREFECT_API_URL")
    run = FlowRunContext.get()
    related = []
    if run is not None and run.flow_run is not None:  # the flow run that sends it
        about = {"prefect.resource.id": f"prefect.flow-run.{run.flow_run.id}", "prefect.resource.role": "flow-run"}
        related = [RelatedResource(about)]
    made = Event(
        event=event,
        resource=Resource({"prefect.resource.id": f"enginesmith.model.{model}", "prefect.resource.name": model}),
        related=related,
        payload={"model": model, **payload},
    )
    try:
        with get_client(sync_client=True) as client:
            # Not `emit_event`: a thread sends its queue, and says nothing of events that did not arrive.
            client.request("POST", "/events", json=[made.model_dump(mode="json")])
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        raise UnavailableError(
            f"{event} did not reach the Prefect server at {server} ({error or type(error).__name__}); start it, or "
            "correct PREFECT_API_URL, and run this again"
        ) from error
    return SentEvent(str(made.id), event, server)
