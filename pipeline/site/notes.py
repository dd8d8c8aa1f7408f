"""What the pages over all models show of each model, kept between runs so that only changed models are read."""

from typing import TypedDict

from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.versions import lookup
from pipeline.site.drawing import engine_anchor
from pipeline.site.model_site import ModelSite

# Verdicts of canaries that are kept of a model.
MOST_OF_MODEL = 20


class CanaryNote(TypedDict):
    """A verdict. report: digest; '' where it is lost."""

    version: str
    target: str
    unit: str
    verdict: str
    reason: str
    against: str
    at: str
    report: str


class GapNote(TypedDict):
    """Machines and the engine that they get of a model, or would but for `why`. version: of the engine; '' where it has
    no page.  anchor: of the engine there, or ''."""

    machines: list[str]
    nodes: int
    state: str
    engine: str
    serves: bool
    asked: str
    version: str
    anchor: str
    why: str


class RolloutNote(TypedDict):
    """A rollout that nodes follow. before, version: what the channel serves, and what comes.  reach: the share of the
    nodes that get it already, in words.  wave, waves: the open one, from 1, and how many there are.  at: when that was
    opened.  by, why: of its start."""

    channel: str
    before: str
    version: str
    state: str
    reach: str
    wave: int
    waves: int
    at: str
    by: str
    why: str


class ModelNote(TypedDict):
    """What the pages over all models show of one, as it is kept between runs. key: digest of its keys.

    version: that it serves by its usual channel, else its newest.  versions: all, oldest first.  statuses: number of
    that version's engines by status.  at: when it was published.  problem: why it cannot be read.  graphs: the models
    that it pins versions of, where it is an ensemble.
    """

    key: str
    version: str
    versions: list[str]
    at: str
    channels: dict[str, str]
    statuses: dict[str, int]
    targets: list[str]
    graphs: list[str]
    problem: str
    canaries: list[CanaryNote]
    machines: list[GapNote]
    rollouts: list[RolloutNote]


def note_of(site: ModelSite) -> ModelNote:
    """What is noted of a model."""
    usual = next((item for item in site.listed if item.version == site.usual), None)
    try:
        manifest = lookup.load(site.store, site.model, site.usual)
        targets, graphs = [entry.target for entry in manifest.engines], [pin.model for pin in manifest.graphs]
    except EnginesmithError:  # the version's own page says so
        targets, graphs = [], []
    return ModelNote(
        key=site.keys.digest,
        version=site.usual,
        versions=list(site.versions),
        at=(usual.created_at if usual else None) or "",
        channels={channel.name: channel.version or "?" for channel in site.channels},
        statuses=dict(usual.engines) if usual else {},
        targets=list(dict.fromkeys(targets)),
        graphs=graphs,
        problem=(usual.damage if usual else None) or "",
        canaries=_canaries(site),
        machines=[
            GapNote(
                machines=list(row.names),
                nodes=row.nodes,
                state=row.state,
                engine=row.engine.unit if row.engine else "",
                serves=row.serves,
                asked=row.asked,
                version=row.version if row.version in site.versions else "",
                anchor=engine_anchor(row.engine) if row.engine else "",
                why=row.why,
            )
            for row in site.machines
        ],
        rollouts=_rollouts(site),
    )


def _rollouts(site: ModelSite) -> list[RolloutNote]:
    return [
        RolloutNote(
            channel=item.channel,
            before=rollout.base,
            version=rollout.version,
            state=item.state,
            reach=item.reach,
            wave=rollout.wave + 1,
            waves=len(rollout.plan.waves),
            at=rollout.opened,
            by=rollout.history[0].by,
            why=rollout.history[0].why,
        )
        for item, rollout in ((item, item.rollout) for item in site.rollouts if item.is_active)
    ]


def _canaries(site: ModelSite) -> list[CanaryNote]:
    """The newest verdicts of a model, newest first."""
    found: list[CanaryNote] = []
    for version in site.versions if site.keys.canaries else ():
        try:
            manifest = lookup.load(site.store, site.model, version)
            verdicts = canaries(site.store, manifest)
        except EnginesmithError:  # the version's own page says so
            continue
        found += [
            CanaryNote(
                version=version,
                target=item.target,
                unit=item.unit,
                verdict=item.verdict,
                reason=item.reason,
                against=item.against,
                at=item.created_at,
                report=item.report if item.report in site.canary_reports else "",
            )
            for item in verdicts
        ]
    return sorted(found, key=lambda item: item["at"], reverse=True)[:MOST_OF_MODEL]
