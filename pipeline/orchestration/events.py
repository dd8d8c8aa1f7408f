"""What Enginery tells a Prefect server: events, from which automations start the next step.

Each event is about one model, as the resource `enginery.model.NAME`, and its payload names things by digest and by the
registry's URI, which never holds credentials. An event counts as told once the server has said that it has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, RelatedResource, Resource
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from enginery.core.digest import digest_of
from enginery.core.errors import UnavailableError
from enginery.registry.build_lock import hold_build_lock
from enginery.registry.registered_specs import Registration
from enginery.registry.store.base import Store
from pipeline.orchestration.payloads import JUDGED, PAYLOADS, PUBLISHED, REGISTERED, remember_sent, was_sent


@dataclass(frozen=True)
class SentEvent:
    """An event that the server has. id: how `prefect event` and the UI know it.  server: its API."""

    id: str
    event: str
    server: str


def send_registered(store: Store, item: Registration) -> SentEvent:
    """Tell that a spec was registered. Raises UnavailableError."""
    payload = {"spec": item.address, "digest": item.bundle.digest, "registry": store.uri, "by": item.by}
    return send_event(REGISTERED, item.bundle.model, payload)


def send_published(store: Store, model: str, version: str, manifest: str) -> SentEvent:
    """Tell that a version was published. manifest: its digest. Raises UnavailableError."""
    payload = {"version": version, "manifest": manifest, "registry": store.uri}
    return send_event(PUBLISHED, model, payload)


def send_judged(
    store: Store, model: str, version: str, channel: str, target: str, verdict: str, report: str
) -> SentEvent:
    """Tell how a canary of a version against what a channel serves ended on a target. report: digest of its blob.
    Raises UnavailableError."""
    about = {"version": version, "channel": channel, "target": target}
    return send_event(JUDGED, model, {**about, "verdict": verdict, "report": report, "registry": store.uri})


def send_published_once(store: Store, model: str, version: str, manifest: str) -> SentEvent | None:
    """Tell that a version was published, unless that was told before; None then. Raises UnavailableError.

    Of several runs that end with the same version at once, one tells.
    """
    with hold_build_lock(store, digest_of({"telling": PUBLISHED, "of": manifest}), f"telling of {model}@{version}"):
        if was_sent(store, PUBLISHED, manifest):
            return None
        told = send_published(store, model, version, manifest)
        remember_sent(store, PUBLISHED, manifest, told.id)
        return told


def send_event(event: str, model: str, payload: Mapping[str, object]) -> SentEvent:
    """Send an event and wait until the server has taken it. Raises UnavailableError without a server, or when it does
    not answer; ValueError for a payload that is not what `PAYLOADS` says."""
    PAYLOADS[event].check(event, {"model", *payload})
    server = PREFECT_API_URL.value()
    if not server:
        raise UnavailableError(f"{event} cannot be told: no Prefect server is configured; set PREFECT_API_URL")
    made = Event(
        event=event,
        resource=Resource({"prefect.resource.id": f"enginery.model.{model}", "prefect.resource.name": model}),
        related=_run(),
        payload={"model": model, **payload},
    )
    try:
        with get_client(sync_client=True) as client:
            # Not `emit_event`, whose queue is emptied by a thread that says nothing of what did not arrive.
            client.request("POST", "/events", json=[made.model_dump(mode="json")])
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        raise UnavailableError(
            f"{event} did not reach the Prefect server at {server} ({error or type(error).__name__}); start it, or "
            "correct PREFECT_API_URL, and run this again"
        ) from error
    return SentEvent(str(made.id), event, server)


def _run() -> list[RelatedResource]:
    """The flow run that this happens in."""
    run = FlowRunContext.get()
    if run is None or run.flow_run is None:
        return []
    found = {"prefect.resource.id": f"prefect.flow-run.{run.flow_run.id}", "prefect.resource.role": "flow-run"}
    return [RelatedResource(found)]
