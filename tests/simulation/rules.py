"""The rules that a registry keeps at every moment, checked at each change of the store and at the end of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any

from enginesmith.core.errors import digest_of_bytes, digests_in
from enginesmith.core.parsing import Malformed
from enginesmith.registry.manifest import parse
from enginesmith.registry.rollouts.rollout_state import Rollout, ServingNode, Slice
from enginesmith.registry.store.layout import (
    BLOBS,
    LEASES,
    MARK_STATE,
    MODELS,
    blob_key,
    channel_history_key,
    manifest_key,
)
from enginesmith.registry.versions import channel_state
from enginesmith.registry.versions.channel_state import Channel, Move, Position, parse_channel, parse_history
from tests.simulation.store import Content
from tests.simulation.world import APART, BEGIN, Violation, World

NODES = tuple(ServingNode(f"node-{number}") for number in range(8))


@dataclass
class Rules:
    """Watches one store. published: every manifest that was ever there, by key.  states: those that each channel
    was in, and from which step and time on.  moves: all that it made.
    soaking: since when all of each wave of a rollout is reached, by the true time.  paused: the same of its pause;
    pauses: number and length of the pauses of each wave that ended.  kept_moves: so many rollbacks must lead to what is
    there.  served_last: until when a channel
    led to each version.  unwell: rollout -> node's report -> since which step it says that the node fails.  grace: of
    collections.  copies: whether a mirror writes it.  lost: blobs that a disk lost before the run began.
    generations: of garbage marks, those that were published.  decided: where the channel was when a move or rollout
    was decided on, by its reason."""

    world: World
    content: Content
    grace: timedelta
    copies: bool = False
    lost: frozenset[str] = frozenset()
    kept_moves: int = 0
    published: dict[str, bytes] = field(default_factory=dict)
    states: dict[str, list[tuple[int, datetime, Channel]]] = field(default_factory=dict)
    moves: dict[str, list[Move]] = field(default_factory=dict)
    soaking: dict[tuple[str, int], datetime] = field(default_factory=dict)
    paused: dict[str, datetime] = field(default_factory=dict)
    pauses: dict[tuple[str, int], list[timedelta]] = field(default_factory=dict)
    served_last: dict[str, datetime] = field(default_factory=dict)
    unwell: dict[str, dict[str, int]] = field(default_factory=dict)
    generations: set[int] = field(default_factory=set)
    decided: dict[str, Position] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, data in self.content.objects.items():
            self.take(key, data)

    def take(self, key: str, data: bytes) -> None:
        """Note what was there before the run began."""
        if key == MARK_STATE:
            self.generations.update(range(json.loads(data)["generation"] + 1))
        match key.removeprefix(MODELS).split("/"):
            case [_, "versions", _, "manifest.json"]:
                self.published[key] = data
            case [model, "channels", file]:
                state = parse_channel(data, model, file.removesuffix(".json"))
                assert state is not None
                history = parse_history(self.content.objects.get(channel_history_key(model, state.name)), state.name)
                self.states[f"{model}:{state.name}"] = [(0, BEGIN, state)]
                self.moves[f"{model}:{state.name}"] = list(history.with_state(state).moves)

    def changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        """Check one change of the store. Raises Violation."""
        if key.startswith("blobs/"):
            if after is None and digest_of_bytes(before or b"") == key.rpartition("/")[2]:
                self._blob_removed(key)
            return
        if key == MARK_STATE and after is not None:
            self._generations_changed(json.loads(after))
        match key.removeprefix(MODELS).split("/"):
            case ["serving", model, name, rollout, _]:
                self._check_report(key, f"{model}:{name}", rollout, after)
            case [_, "versions", _, "manifest.json"]:
                self._manifest_changed(key, before, after)
            case [_, "versions", *names]:
                self._evidence_changed(key, names, after)
            case [model, "channels", name]:
                self._channel_changed(model, name.removesuffix(".json"), before, after)
            case [model, "pins", name] if after is None:
                self.served_last[f"{model}@{name.removesuffix('.json')}"] = self.world.time
            case [model, "pins", name] if after is not None and before is None:
                self._check_lease(f"pin of {name}")
                self._there(model, name.removesuffix(".json"), None, f"pin of {name}")

    def _generations_changed(self, state: Mapping[str, Any]) -> None:
        """Marks count only of generations that a collection published."""
        self.generations.add(state["generation"])
        count = set(range(state["generation"])).difference(state["abandoned"])
        if count - self.generations:
            raise Violation(f"marks of generation {min(count - self.generations)} count, which was never published")

    def _check_report(self, key: str, where: str, rollout: str, after: bytes | None) -> None:
        """What nodes report of a rollout stays while that runs: else it goes on though they fail."""
        states, failure_counts = self.states.get(where), self.unwell.setdefault(rollout, {})
        runs = states[-1][2].active_rollout if states else None
        if after is None and runs and runs.id == rollout:
            raise Violation(f"a report of rollout {rollout} was deleted, which runs")
        failure_counts.pop(key, None)
        if after and json.loads(after).get("failure"):
            failure_counts[key] = self.world.steps

    def _evidence_changed(self, key: str, names: Sequence[str], after: bytes | None) -> None:
        """What is attached is there; who deletes a document of a version holds the claim."""
        if after is None:
            self._check_claim(key)
        elif names[1] == "attachments":
            self._check_lease(key)
            if blob_key(names[2]) not in self.content.objects:
                raise Violation(f"{key} names blob {names[2][:12]}, which is not there")

    def _check_lease(self, what: str) -> None:
        """Who writes what refers to content holds a lease, which no server's clock counts as over."""
        leases = (json.loads(self.content.objects[key]) for key in self.content.below(LEASES))
        if not any(self._is_held(lease["holder"], lease["expires"]) for lease in leases):
            raise Violation(f"{what} was written without a lease that is held")

    def _check_claim(self, what: str) -> None:
        """Who deletes holds the claim to collect, which no server's clock counts as over."""
        sweeper = json.loads(self.content.objects.get(MARK_STATE, b"{}")).get("sweeper")
        if sweeper is None or not self._is_held(sweeper["by"], sweeper["expires"]):
            raise Violation(f"{what} was deleted by a collection that does not hold the claim")

    def _is_held(self, holder: str, expires: str) -> bool:
        actor = self.world.current
        is_mine = actor is None or holder == f"{actor.process.name} 1"
        return is_mine and self.world.time + APART < datetime.fromisoformat(expires)

    def _blob_removed(self, key: str) -> None:
        self._check_claim(key[:14])
        digest = key.rpartition("/")[2].encode()
        for other_key in self.content.below(MODELS):
            if digest in self.content.objects[other_key] and self._is_live(other_key):
                raise Violation(f"blob {digest[:12].decode()} was deleted, and {other_key} names it")

    def _is_live(self, key: str) -> bool:
        """Whether a document counts: one beside a manifest that is gone does not."""
        its_manifest = _manifest_beside(key)
        return its_manifest is None or its_manifest in self.content.objects

    def _manifest_changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        if after is None:
            self._version_removed(key)
            return
        if before is not None:
            raise Violation(f"{key} was overwritten")
        is_number = key.split("/")[-2].isdecimal()  # a name that a writer chose may come again
        if key in self.published and is_number and not (self.copies and self.published[key] == after):
            raise Violation(
                f"{key} was used before, by {'the same' if self.published[key] == after else 'another'} version"
            )
        self.published[key] = after
        self._check_lease(key)
        self._whole(key, after)
        new_document = parse(after)
        for other_name, data in self.content.objects.items():
            if (
                other_name != key
                and not self.copies
                and other_name.endswith("/manifest.json")
                and (old_document := parse(data)).content == new_document.content
            ):
                raise Violation(f"{key} repeats version {old_document.version}")

    def _whole(self, key: str, data: bytes, lost: frozenset[str] = frozenset()) -> None:
        missing_items = [item for item in parse(data).blobs() if blob_key(item) not in self.content.objects]
        if missing_items and not lost.issuperset(missing_items):
            raise Violation(f"{key} names blob {missing_items[0][:12]}, which is not there")

    def missing(self) -> set[str]:
        """The blobs that manifests name and that are not there."""
        manifests = (data for key, data in self.content.objects.items() if key.endswith("/manifest.json"))
        return {
            item for data in manifests for item in parse(data).blobs() if blob_key(item) not in self.content.objects
        }

    def garbage(self) -> set[str]:
        """The blobs that no document names, whatever it is a document of."""
        live_filter = filter(self._is_live, self.content.below(MODELS))
        named_items = {item for key in live_filter for item in digests_in(self.content.objects[key])}
        return {key for key in self.content.below(BLOBS) if key.rpartition("/")[2] not in named_items}

    def _version_removed(self, key: str) -> None:
        self._check_claim(key)
        model, _, version, _ = key.removeprefix(MODELS).split("/")
        if self.world.time - self.served_last.get(f"{model}@{version}", BEGIN) < self.grace - timedelta(minutes=1):
            raise Violation(f"{model}@{version} was deleted within the grace period after a channel or a pin led to it")
        for other_name, data in self.content.objects.items():
            match other_name.removeprefix(MODELS).split("/"):
                case [its, "channels", name] if its == model:
                    state = parse_channel(data, model, name.removesuffix(".json"))
                    if state and version in state.served.values():
                        raise Violation(f"{model}@{version} was deleted, and {other_name} leads to it")
                case [its, "pins", name] if its == model and name == f"{version}.json":
                    raise Violation(f"{model}@{version} was deleted, and it is pinned")
                case [_, "versions", _, "manifest.json"] if b'"graphs"' in data:
                    if any((graph.model, graph.version) == (model, version) for graph in parse(data).graphs):
                        raise Violation(f"{model}@{version} was deleted, and {other_name} is made of it")
        self._check_returns(model, version)

    def _check_returns(self, model: str, version: str) -> None:
        """What a rollback leads to stays, if the collection keeps moves and began after the channel's last change."""
        if not self.kept_moves or self.world.current is None:
            return
        start_time = next(call.began for call in reversed(self.world.calls) if call.actor == self.world.current.name)
        for place, states in self.states.items():
            previous = _before_last(self.moves[place])
            if place.startswith(f"{model}:") and states[-1][0] < start_time and previous and previous[1] == version:
                raise Violation(f"{model}@{version} was deleted, and a rollback of {place} leads to it")

    def _channel_changed(self, model: str, name: str, before: bytes | None, after: bytes | None) -> None:
        if after is None:
            raise Violation(f"channel {model}:{name} was deleted")
        old, new_channel = (parse_channel(data, model, name) for data in (before, after))
        assert new_channel is not None
        for digest, version in new_channel.served.items():
            self._there(model, version, digest, f"channel {name}")
        for snapshot in new_channel.snapshots.values():
            if blob_key(snapshot) not in self.content.objects:
                raise Violation(f"channel {name} names snapshot {snapshot[:12]}, which is not there")
        if old and (new_channel.moves, new_channel.revision) <= (old.moves, old.revision):
            raise Violation(f"channel {model}:{name} went back from move {old.moves}, revision {old.revision}")
        self._check_moves(new_channel, old)
        self._check_decided(new_channel, channel_state.position_of(old))
        if old is None or not (
            new_channel.served.items() <= old.served.items() and new_channel.snapshots.items() <= old.snapshots.items()
        ):
            self._check_lease(f"channel {name}")
        if new_channel.active_rollout and new_channel.active_rollout.base_manifest != new_channel.manifest:
            raise Violation(f"rollout {new_channel.active_rollout.id} goes on though its channel was moved")
        for version in old.served.values() if old else ():
            self.served_last[f"{model}@{version}"] = self.world.time
        if new_channel.rollout:
            self._check_serving(new_channel, new_channel.rollout)
            self._check_rollout(new_channel.rollout, old.rollout if old else None)
        self.states.setdefault(f"{model}:{name}", []).append((self.world.steps, self.world.time, new_channel))

    def _check_decided(self, new: Channel, before: Position) -> None:
        """A move, and the begin of a rollout, start from where the channel was when they were decided on."""
        moves, rollout = channel_state.position_of(new)
        start_text = new.rollout.history[0].by if new.rollout and rollout not in ("", before[1]) else ""
        if self.decided.get(new.move.why if moves > before[0] else start_text, before) != before:
            raise Violation(f"channel {new.model}:{new.name} was not where it was when its change was decided on")

    def _check_moves(self, new: Channel, old: Channel | None) -> None:
        """No move is lost: the history has all before the last one. No call moves a channel twice."""
        place = f"{new.model}:{new.name}"
        data = self.content.objects.get(channel_history_key(new.model, new.name))
        try:
            stored_history = parse_history(data, place)
            moves = stored_history.with_state(new).moves
        except Malformed as error:
            raise Violation(f"channel {place} lost moves: {error}") from error
        rollouts = {item.id for item in (new.rollout, *stored_history.rollouts) if item}
        if old and old.rollout and old.rollout.id not in rollouts:
            raise Violation(f"channel {place} lost rollout {old.rollout.id}")
        earlier_moves = self.moves.setdefault(place, [])
        if new.moves == len(earlier_moves) + 1:
            earlier_moves.append(new.move)
            if new.move.action == "rollback" and (new.manifest, new.version) != _before_last(earlier_moves[:-1]):
                raise Violation(f"channel {place} was rolled back to {new.version}")
        if list(moves) != earlier_moves:
            raise Violation(f"channel {place} has other moves than were made")
        if self.copies:
            return  # whose moves say which move they repeat
        whys = [move.why for move in moves if move.why]
        if len(whys) != len(set(whys)):
            raise Violation(f"channel {place} was moved twice by one call")

    def _check_serving(self, state: Channel, rollout: Rollout) -> None:
        """One that is over leads nobody; one that runs leads nodes to its version or to what the channel serves, and
        all of them to its version once it has reached all."""
        is_over = rollout.state not in ("running", "paused")
        reaches_all = any(part == Slice(1_000_000) for part in rollout.reach)
        for node in NODES[:4]:
            digest = state.served_to(node).manifest
            if digest != (rollout.manifest if reaches_all and not is_over else state.manifest) and (
                is_over or reaches_all or digest != rollout.manifest
            ):
                raise Violation(f"rollout {rollout.id} is {rollout.state} and leads {node.name} to {digest[:12]}")

    def _check_rollout(self, new: Rollout, old: Rollout | None) -> None:
        """One that ended does not go on, one that runs is not replaced, and no decision is lost."""
        self._count_time(new)
        if old is None or old == new:
            return
        if old.id == new.id and old.is_finished:
            raise Violation(f"rollout {new.id} was {old.state} and is {new.state}")
        if old.id == new.id and new.history[: len(old.history)] != old.history:
            raise Violation(f"rollout {new.id} lost a decision: {old.history[-1].what}")
        if (new.wave > old.wave or new.state == "done") and old.id == new.id:
            self._check_time(old)
            look_time = next(call.began for call in reversed(self.world.calls) if call.actor == self.world.current.name)
            if any(step < look_time for step in self.unwell.get(old.id, {}).values()):
                raise Violation(f"wave {old.wave} of rollout {old.id} ended though nodes fail")
        if old.id != new.id and not old.is_finished:
            raise Violation(f"rollout {new.id} began while {old.id} was {old.state}")

    def _count_time(self, rollout: Rollout) -> None:
        """Note since when all of the wave is reached, and how long the pauses were since."""
        wave = rollout.id, rollout.wave
        if rollout.is_open:
            self.soaking.setdefault(wave, self.world.time)
        if rollout.state == "paused":
            self.paused.setdefault(rollout.id, self.world.time)
        elif start_item := self.paused.pop(rollout.id, None):
            start_item = max(start_item, self.soaking.get(wave, self.world.time))
            self.pauses.setdefault(wave, []).append(self.world.time - start_item)

    def _check_time(self, rollout: Rollout) -> None:
        """The wave of a rollout may end: it lasted as long as it must, without its pauses."""
        wave = rollout.id, rollout.wave
        start_time, pauses = self.soaking.get(wave), self.pauses.get(wave, [])
        min_time = timedelta(seconds=rollout.plan.soaks_s[rollout.wave]) + sum(pauses, timedelta())
        if start_time is None or self.world.time - start_time < min_time - 2 * APART * (1 + len(pauses)):
            raise Violation(f"wave {rollout.wave} of rollout {rollout.id} ended before its time (from {start_time})")

    def _there(self, model: str, version: str, digest: str | None, who: str) -> None:
        key = manifest_key(model, version)
        data = self.content.objects.get(key)
        if data is None:
            raise Violation(f"{who} leads to {model}@{version}, which is not there")
        if digest is not None and parse(data).digest != digest:
            raise Violation(f"{who} leads to another {model}@{version}")
        self._whole(key, data, self.lost if digest is None else frozenset())  # any version may be pinned

    def states_between(self, where: str, began: int, ended: int, since: datetime | None = None) -> list[Channel]:
        """The states of a channel at some step from `began` to `ended`; and those that it had at `since` or later."""
        states = self.states.get(where, [])
        states_before = [state for step, _, state in states if step <= began]
        late_states = [state for (_, _, state), (_, replaced, _) in pairwise(states) if since and replaced > since]
        return [*late_states, *states_before[-1:], *(state for step, _, state in states if began < step <= ended)]

    def served_between(self, where: str, node: ServingNode | None, began: int, ended: int) -> set[str]:
        """Digests of the manifests that a channel led a node to at some step from `began` to `ended`."""
        return {state.served_to(node).manifest for state in self.states_between(where, began, ended)}


@lru_cache(1 << 10)
def _manifest_beside(key: str) -> str | None:
    parts = key.removeprefix(MODELS).split("/")
    return manifest_key(parts[0], parts[2]) if parts[1] == "versions" else None


def _before_last(moves: list[Move]) -> tuple[str, str] | None:
    """What a rollback returns to: the promotion before the last one that was not rolled back."""
    active_moves: list[Move] = []
    for move in moves:
        active_moves = [*active_moves, move] if move.action == "promote" else active_moves[:-1]
    return (active_moves[-2].manifest, active_moves[-2].version) if len(active_moves) > 1 else None
