"""A rollout for people and programs: its waves, what nodes report, what it waits for, what was decided."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from enginesmith.core.codec import encode
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.rollouts.reports import Heard, read_reports
from enginesmith.registry.rollouts.state import EarlierRollout, Rollout, parse_time
from enginesmith.registry.rollouts.waves import WHOLE, Slice
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.state import Channel, read_history
from pipeline.rollout.gates import GateResult, judge_gates


@dataclass(frozen=True)
class RolloutStatus:
    """A rollout and what a look at it sees now, by the store's clock. earlier: the channel's rollouts before it."""

    rollout: Rollout
    gates: tuple[GateResult, ...]
    heard: Heard
    earlier: tuple[EarlierRollout, ...]
    now: datetime

    def to_json(self) -> dict[str, object]:
        """For programs."""
        found = self.heard.reports
        failing = [encode(report) for report in found if report.failure]
        regions = Counter(report.region for report in found)
        reports = {
            "nodes": self.heard.nodes,
            "read": len(found),
            "well": len(found) - len(failing),
            "failing": failing[:50],
            "regions": dict(sorted(regions.items())),
            "silent": sum(report.is_silent(self.now) for report in found),
        }
        gates = [encode(gate) for gate in self.gates]
        earlier = encode(self.earlier)
        return {**encode(self.rollout), "earlier": earlier, "gates": gates, "reports": reports}

    def list_waves(self) -> list[list[str]]:
        """A row for each wave: number, who, least time in seconds, state."""
        rollout = self.rollout
        rows = []
        for index, (wave, soak_s) in enumerate(zip(rollout.plan.waves, rollout.plan.soaks_s, strict=True)):
            if index < rollout.wave or rollout.state == "done":
                state = "passed"
            elif index > rollout.wave:
                state = "" if not rollout.is_finished else "never"
            else:
                state = self._open_wave()
            rows.append([str(index + 1), self._describe_wave(wave), f"{soak_s} s", state])
        return rows

    def _describe_wave(self, wave: Slice) -> str:
        nodes = self.rollout.nodes
        if not nodes or wave.share_ppm == WHOLE or wave.region or wave.label:
            return str(wave)
        return f"{wave}, at most {wave.share_ppm * nodes // WHOLE} of {nodes}"

    def _open_wave(self) -> str:
        rollout = self.rollout
        if rollout.state != "running":
            return rollout.state
        if not rollout.is_open:
            return f"opening: {', '.join(map(str, rollout.reach))}"
        if rollout.soaking is None:
            return "open, and no controller has looked since"
        return f"open for {(self.now - parse_time(rollout.soaking)).total_seconds():.0f} s"


def read_status(store: Store, channel: Channel, now: datetime) -> RolloutStatus | None:
    """The status of a channel's rollout; None where it never had one. Raises IntegrityError for damaged documents."""
    rollout = channel.rollout
    if rollout is None:
        return None
    earlier = tuple(item for item in read_history(store, channel).rollouts if item.id != rollout.id)
    if rollout.is_finished:
        return RolloutStatus(rollout, (), Heard(), earlier, now)
    heard, manifest = read_reports(store, rollout), lookup.load(store, rollout.model, rollout.version)
    gates = judge_gates(rollout, heard, canaries(store, manifest), now)
    return RolloutStatus(rollout, gates, heard, earlier, now)
