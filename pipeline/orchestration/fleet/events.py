"""Telling a Prefect server what the fleet lacks, so that its deployments build and prove it.

`enginery.model.registered` for a model to be built again, `enginery.engine.unproven` for engines to be proven on their
hardware; what is in them stands in `pipeline.orchestration.payloads`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.fleet.work import FleetWork
from pipeline.orchestration.payloads import REGISTERED, UNPROVEN

_BY = "enginery fleet"


@dataclass(frozen=True)
class Message:
    """An event that is to be told. payload: JSON."""

    event: str
    model: str
    payload: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return {"event": self.event, "model": self.model, "payload": dict(self.payload)}


def messages(work: Iterable[FleetWork], registry: str) -> tuple[Message, ...]:
    """One event for each model to build, and for each version and generation to prove, in the order of the work.

    registry: its URI, which holds no credentials. What cannot be done as things are is left out.
    """
    builds: dict[str, list[str]] = {}
    proofs: dict[tuple[str, str, str], list[str]] = {}
    for item in work:
        unit = item.unit
        if not item.ready:
            continue
        if unit.kind == "build":
            builds.setdefault(unit.model, []).append(item.name)
        elif unit.version and item.engine:
            proofs.setdefault((unit.model, unit.version, unit.target.sm), []).append(item.engine)
    to_build = (
        Message(REGISTERED, model, {"spec": f"registered:{model}", "registry": registry, "units": units, "by": _BY})
        for model, units in builds.items()
    )
    to_prove = (
        Message(
            UNPROVEN,
            model,
            {"version": version, "target": target, "engines": engines, "registry": registry, "by": _BY},
        )
        for (model, version, target), engines in proofs.items()
    )
    return (*to_build, *to_prove)


def tell(message: Message) -> str:
    """Send an event, and wait until the Prefect server has taken it; its id.

    Raises UnavailableError without a server (PREFECT_API_URL), or when it does not answer.
    """
    from pipeline.orchestration import events

    return events.send_event(message.event, message.model, message.payload).id
