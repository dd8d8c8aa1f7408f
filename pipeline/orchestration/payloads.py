"""The events that Enginesmith sends to a Prefect server: the fields of each, and the registry's record of those sent.

`events`, and servers by `enginesmith.serving.drift_event`, send nothing else; triggers read nothing else; and
docs/guides/deployments.md has the table that `markdown` writes. Tests compare all of them. Prefect is not imported
here, so that a run with nothing to do need not load it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from enginesmith.core.digest import digest_of
from enginesmith.registry.builds.records import recall, remember
from enginesmith.registry.store.base import Store
from enginesmith.serving import drift_event

_RECORD = "told"
REGISTERED = "enginesmith.model.registered"
PUBLISHED = "enginesmith.engine.published"
UNPROVEN = "enginesmith.engine.unproven"
JUDGED = "enginesmith.canary.finished"
DRIFTED = drift_event.EVENT
ADVANCED = "enginesmith.rollout.advanced"
HALTED = "enginesmith.rollout.halted"
DONE = "enginesmith.rollout.done"

_MODEL = {"model": ""}
_REGISTRY = {"registry": ""}
_ROLLOUT = {"version": "", "channel": "", "rollout": "its id", "wave": "the open one, from 1", "why": ""}


@dataclass(frozen=True)
class Payload:
    """The fields of an event. fields: those that are always in it, each with a description or ''.

    sometimes: optional fields in the same way.  sent: what sends the event, and how often.
    """

    fields: Mapping[str, str]
    sent: str
    sometimes: Mapping[str, str] = field(default_factory=dict)

    def check(self, event: str, given: Collection[str]) -> None:
        """Raise ValueError for a payload that lacks a field or has an unknown one, which is a bug of the sender."""
        names = set(given)
        lacking, unknown = self.fields.keys() - names, names - self.fields.keys() - self.sometimes.keys()
        if lacking or unknown:
            raise ValueError(f"{event}: lacks {sorted(lacking)}, has unknown {sorted(unknown)}; see {__name__}")


PAYLOADS: Mapping[str, Payload] = {
    REGISTERED: Payload(
        _MODEL | {"spec": "`registered:MODEL@DIGEST`, or `registered:MODEL` for the newest"} | _REGISTRY | {"by": ""},
        "by `prefect register` and `watch`; by `enginesmith fleet --apply` for each model with something to build",
        {"digest": "of the bundle", "units": "what the fleet lacks"},
    ),
    PUBLISHED: Payload(
        _MODEL | {"version": "", "manifest": "digest"} | _REGISTRY,
        "by the flows that compile, and `build --runner prefect`; once for each version",
    ),
    UNPROVEN: Payload(
        _MODEL | {"version": "", "target": "`sm_90`", "engines": "digests"} | _REGISTRY | {"by": ""},
        "by `enginesmith fleet --apply`, for each version and GPU generation with something to prove",
    ),
    JUDGED: Payload(
        _MODEL
        | {"version": "", "channel": "", "target": "`sm_90`", "verdict": "", "report": "digest of its blob"}
        | _REGISTRY,
        "by the flow `canary`",
    ),
    DRIFTED: Payload(
        _MODEL
        | {"version": "served", "rate": "of fallbacks", "reference": "the rate before", "since": "ISO 8601, UTC"}
        | _REGISTRY
        | {"by": "host"},
        "by servers with a router, once each: `Router(on_drift=enginesmith.DriftEvent(...))`",
    ),
    ADVANCED: Payload(_MODEL | _ROLLOUT | _REGISTRY, "by the flow `advance-rollouts`, for each wave that opens"),
    HALTED: Payload(_MODEL | _ROLLOUT | _REGISTRY, "by the same, for a rollout that a gate halted, or a move aborted"),
    DONE: Payload(_MODEL | _ROLLOUT | _REGISTRY, "by the same, for one whose channel was promoted"),
}


def markdown() -> str:
    """The table of events, as docs/guides/deployments.md has it."""

    def list_fields(fields: Mapping[str, str]) -> str:
        return ", ".join(f"`{name}`" + (f" ({what})" if what else "") for name, what in fields.items())

    lines = ["| event | payload | sent |", "|---|---|---|"]
    for event, item in PAYLOADS.items():
        also = f"; sometimes {list_fields(item.sometimes)}" if item.sometimes else ""
        lines.append(f"| `{event}` | {list_fields(item.fields)}{also} | {item.sent} |")
    return "\n".join(lines)


def was_sent(store: Store, event: str, about: str) -> bool:
    """Whether an event about a digest was sent before, by this process or another."""
    return recall(store, _RECORD, _key(event, about)) is not None


def remember_sent(store: Store, event: str, about: str, event_id: str) -> None:
    """Record that an event about a digest was sent. event_id: its id on the server."""
    remember(store, _RECORD, _key(event, about), {"id": event_id})


def _key(event: str, about: str) -> str:
    return digest_of({"event": event, "about": about})
