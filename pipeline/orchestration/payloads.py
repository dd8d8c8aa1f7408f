"""The events that Enginery tells a Prefect server, and what is in each: the one place that says so.

`events` sends nothing else, triggers read nothing else, and docs/guides/deployments.md has the table that `markdown`
writes; tests hold all three to it. Nothing here knows Prefect.

What a Prefect server was told, remembered by the registry: so that whoever asks does not tell it again.

Without Prefect: a run with nothing to do looks here before it loads that.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from enginery.core.digest import digest_of
from enginery.registry.records import recall, remember
from enginery.registry.store.base import Store

REGISTERED = "enginery.model.registered"
PUBLISHED = "enginery.engine.published"
UNPROVEN = "enginery.engine.unproven"
JUDGED = "enginery.canary.finished"

_MODEL = {"model": ""}
_REGISTRY = {"registry": ""}


@dataclass(frozen=True)
class Payload:
    """What an event says. fields: what is always in it, each with what it is where its name does not say that.
    sometimes: the same of what not everybody has to tell.  told: by whom, and how often.
    """

    fields: Mapping[str, str]
    told: str
    sometimes: Mapping[str, str] = field(default_factory=dict)

    def check(self, event: str, given: Collection[str]) -> None:
        """Raise ValueError for a payload that lacks something, or has more: whoever tells it is wrong."""
        names = set(given)
        lacking, unknown = self.fields.keys() - names, names - self.fields.keys() - self.sometimes.keys()
        if lacking or unknown:
            raise ValueError(f"{event}: lacks {sorted(lacking)}, has unknown {sorted(unknown)}; see {__name__}")


PAYLOADS: Mapping[str, Payload] = {
    REGISTERED: Payload(
        _MODEL | {"spec": "`registered:MODEL@DIGEST`, or `registered:MODEL` for the newest"} | _REGISTRY | {"by": ""},
        "by `register` and `watch-specs`; by `enginery fleet --apply` for each model with something to build",
        {"digest": "of the bundle", "units": "what the fleet lacks"},
    ),
    PUBLISHED: Payload(
        _MODEL | {"version": "", "manifest": "digest"} | _REGISTRY,
        "by the flows that compile, and `build --runner prefect`; once for each version",
    ),
    UNPROVEN: Payload(
        _MODEL | {"version": "", "target": "`sm_90`", "engines": "digests"} | _REGISTRY | {"by": ""},
        "by `enginery fleet --apply`, for each version and GPU generation with something to prove",
    ),
    JUDGED: Payload(
        _MODEL
        | {"version": "", "channel": "", "target": "`sm_90`", "verdict": "", "report": "digest of its blob"}
        | _REGISTRY,
        "by the flow `canary`",
    ),
}


def markdown() -> str:
    """The table of events, as docs/guides/deployments.md has it."""
    rows = [
        f"| `{event}` | {_format_list(item.fields)}{_also(item.sometimes)} | {item.told} |"
        for event, item in PAYLOADS.items()
    ]
    return "\n".join(["| event | payload | told |", "|---|---|---|", *rows])


def _format_list(fields: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`" + (f" ({what})" if what else "") for name, what in fields.items())


def _also(fields: Mapping[str, str]) -> str:
    return f"; sometimes {_format_list(fields)}" if fields else ""


_RECORD = "told"


def was_sent(store: Store, event: str, about: str) -> bool:
    """Whether `remember_told` was called for this event about this digest."""
    return recall(store, _RECORD, _key(event, about)) is not None


def remember_sent(store: Store, event: str, about: str, told: str) -> None:
    """Remember that an event about a digest was told. told: the event's id, as the server knows it."""
    remember(store, _RECORD, _key(event, about), {"id": told})


def _key(event: str, about: str) -> str:
    return digest_of({"event": event, "about": about})
