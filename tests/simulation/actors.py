"""What users and programs do to a registry, as actors that run the product's own code."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from enginesmith.client.locate import VersionLocator
from enginesmith.core.errors import digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.core.state import ENSEMBLE, PinnedGraph
from enginesmith.exchange.mirror import mirror
from enginesmith.registry import registered_specs
from enginesmith.registry.collection.references import Rules as Kept
from enginesmith.registry.evidence.attachments import Attachment
from enginesmith.registry.gc import collect
from enginesmith.registry.manifest import write_engines
from enginesmith.registry.rollouts.reports import OUTSIDE, NodeReport, report_key, write_report
from enginesmith.registry.rollouts.rollout_state import Gates, RolloutPlan, ServingNode, Slice, format_time
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.verification.verify import repair, verify
from enginesmith.registry.versions import channel_writes, channels, index, lookup
from enginesmith.registry.versions.channel_state import Channel, Position, position_of, read_channel
from enginesmith.registry.versions.publish import add_attachment, add_attestation, publish
from pipeline.rollout import operations
from pipeline.rollout.advance import RolloutFollower
from tests.enginesmith import registries
from tests.simulation.folders import Folder
from tests.simulation.rules import NODES, Rules
from tests.simulation.store import SimulatedStore
from tests.simulation.world import Call, Violation, World

MODEL, WHOLE_MODEL = "digits", "pair"
# What people attach: the same file to several versions, again and again.
ATTACHED = b"a compile cache"
GRACE = timedelta(minutes=30)
PLAN = RolloutPlan((Slice(500_000), Slice(1_000_000)), (600, 600), Gates(health_ppm=900_000))
SHORT = RolloutPlan((Slice(1_000_000),), (0,))


@dataclass
class Registry:
    """A simulated registry, its rules. site: another site's registry, if any. folders: where nodes watch `stable`."""

    world: World
    store: SimulatedStore
    rules: Rules
    site: "Registry | None" = None
    folders: list[Folder] = field(default_factory=list)

    def publish(self, content: str, version: str | None = None, pause: float = 0.0) -> Call:
        """Publish a version with one engine, which moves `candidate`. pause: seconds after the engine is stored."""
        number = self._number()

        def work() -> str:
            entry = registries.engine(self.store, data=f"engine {content}".encode())
            draft = registries.draft(self.store, content, MODEL)
            pairs = [(entry, registries.approval(entry))]
            if pause:
                self.world.sleep(pause)
            published_manifest = publish(self.store, draft, pairs, wanted_version=version, why=number)
            digests.append(published_manifest.digest)
            return published_manifest.version

        digests: list[str] = []
        call = self.world.call(f"publish {content}", work)
        return self._took_effect(call, "candidate", lambda state: state.manifest in digests)

    def ensemble(self, version: str) -> Call:
        """Publish an ensemble of another model, which pins a version and serves as candidate there."""

        def work() -> str:
            part = lookup.load(self.store, MODEL, version)
            engine = replace(part.engines[0], status="proven")
            entry = registries.engine(self.store, data=write_engines({"part": engine}))
            entry = replace(entry, backend=ENSEMBLE)
            graph = PinnedGraph("part", MODEL, version, part.digest, {"image": "part.image"})
            draft = replace(registries.draft(self.store, version, WHOLE_MODEL), graphs=(graph,))
            return publish(self.store, draft, [(entry, registries.approval(entry))]).version

        return self.world.call(f"ensemble of {version}", work)

    def attach(self, version: str) -> Call:
        """Attach a file to a version, which other versions may have, too."""

        def work() -> str:
            manifest = lookup.load(self.store, MODEL, version)
            models = (MODEL, version, manifest.digest)
            file, text = digest_of_bytes(ATTACHED), "2026-01-02T00:00:00+00:00"
            attachment = Attachment("cache.bin", "cache", *models, file, len(ATTACHED), "ada", text)
            path: Any = SimpleNamespace(read_bytes=lambda: ATTACHED)
            return add_attachment(self.store, manifest, attachment, path)[0].digest

        return self.world.call(f"attach to {version}", work)

    def promote(self, version: str, channel: str = "stable") -> Call:
        """Point a channel at a version, as the channel's state at the beginning asks for."""
        number = self._number()

        def work() -> str:
            decided_on, manifest = self._decide(number, channel), lookup.load(self.store, MODEL, version)
            channels.promote(self.store, manifest, channel, why=number, decided_on=decided_on)
            return manifest.digest

        call = self.world.call(f"promote {version} {channel}", work)
        return self._took_effect(call, channel, lambda state: state.manifest == call.result)

    def rollback(self, channel: str = "stable") -> Call:
        """Point a channel at what it served before."""
        number = self._number()

        def work() -> str:
            decided_on = self._decide(number, channel)
            return channels.rollback(self.store, MODEL, channel, why=number, decided_on=decided_on).manifest

        call = self.world.call(f"rollback {channel}", work)
        return self._took_effect(call, channel, lambda state: state.move.why == number)

    def _decide(self, number: str, channel: str) -> Position:
        """Where a channel is, from which alone the move or rollout of this number may start."""
        position = position_of(read_channel(self.store, MODEL, channel))
        self.rules.decided[number] = position
        return position

    def _took_effect(self, call: Call, channel: str, shows: Callable[[Channel], bool], stale_s: float = 0.0) -> Call:
        """The call. Raises Violation if it was acknowledged, and no state that the channel had meanwhile shows it.
        stale_s: how long before the call a state counts, too."""
        if call.acknowledged and self.world.name != "beginning":
            start_time = call.at - timedelta(seconds=stale_s) if stale_s else None
            states = self.rules.states_between(f"{MODEL}:{channel}", call.began, call.ended or 0, start_time)
            if not any(map(shows, states)):
                raise Violation(f"{call.what} was acknowledged, and {channel} does not show it")
        return call

    def listing(self, mended: bool = False) -> Call:
        """List all models, by the index where there is one. mended: a collection came after all that was stale.

        A stale list may miss the lease of a writer whose write of the index failed; then the entry that it had a moment
        ago counts. What a writer finds by a stale list may go into the index, which the next collection mends."""

        def work() -> str:
            (listed_entry,) = (entry for entry in index.list_all(self.store) if entry.model == MODEL)
            versions.extend(listed_entry.versions)
            return listed_entry.channels["stable"]

        versions: list[str] = []
        texts_before = {
            str(call.result) for call in self.world.calls if call.what.startswith("publish") and call.acknowledged
        }
        call = self.world.call("list", work)
        other_filter = set(filter(self.has, texts_before))
        temper = self.world.temper
        is_exact = mended or not temper.stale
        if call.acknowledged and is_exact and other_filter - set(versions):
            raise Violation(f"a list has {versions}, and not {sorted(other_filter)}")
        if call.acknowledged and mended and (gone_versions := {v for v in versions if not self.has(v)}):
            raise Violation(f"a list has {sorted(gone_versions)}, which are gone")
        late_s = 0.0 if self.world.calm or not temper.stale else temper.stale_s
        return self._took_effect(call, "stable", lambda state: state.version == call.result, late_s)

    def has(self, version: str) -> bool:
        """Whether a version is there now."""
        return manifest_key(MODEL, version) in self.store.content.objects

    def collect(self) -> Call:
        """Collect garbage, as a nightly job does."""

        def work() -> int:
            items = collect(self.store, Kept(1, self.rules.kept_moves), self.rules.grace, delete=True).items
            return sum(item.state == "deleted" for item in items)

        return self.world.call(f"gc of {self.store.name}", work)

    def attest(self, version: str) -> Call:
        """Add evidence to a version, which the snapshots of the channels that serve it then have."""
        number = self._number()

        def work() -> str | None:
            manifest = lookup.load(self.store, MODEL, version)
            return add_attestation(self.store, manifest, registries.report(manifest.engines[0], host=number))

        return self.world.call(f"attest {version}", work)

    def make_index(self) -> Call:
        """Make the index, as a list of many models does."""
        return self.world.call("index", lambda: index.make_index(self.store))

    def repair(self) -> Call:
        """Verify all, and mend what is found."""

        def work() -> tuple[str, ...]:
            verification = verify(self.store)
            repair(self.store, verification)
            return tuple(
                f"{item.kind} {item.what}" for item in verification.problems if item.fault or item.kind == "unsettled"
            )

        return self.world.call("verify --repair", work)

    def pin(self, version: str) -> Call:
        """Pin a version."""
        return self.world.call(
            f"pin {version}", lambda: registered_specs.pin(self.store, lookup.load(self.store, MODEL, version))
        )

    def unpin(self, version: str) -> Call:
        """Take a pin away."""
        return self.world.call(f"unpin {version}", lambda: registered_specs.unpin(self.store, MODEL, version))

    def pull(self, reference: str, node: ServingNode | None = None) -> Call:
        """Locate a version and read its engine, as a node does. Raises Violation for an answer that was never right."""

        def work() -> str:
            locate = VersionLocator(self.store, node=node).locate(parse_reference(reference))
            for entry in locate.manifest.engines:
                self.store.read_blob(str(entry.digest))
            return locate.manifest.digest

        call = self.world.call(f"pull {reference}{f' by {node.name}' if node else ''}", work)
        if call.acknowledged and ":" in reference:
            right_names = self.rules.served_between(reference, node, call.began, call.ended or 0)
            if call.result not in right_names:
                short_digests = sorted(digest[:12] for digest in right_names)
                raise Violation(f"{call.what} gave {str(call.result)[:12]}, and the channel served {short_digests}")
        return call

    def mirror(self) -> Call:
        """Copy what stable leads to, and the channel's move, to the other site."""
        assert self.site is not None
        dest, references = self.site.store, [parse_reference(f"{MODEL}:stable")]
        return self.world.call("mirror", lambda: mirror(self.store, references, dest, with_channels=True).versions)

    def watch(self, number: int, looks: int = 1, pause: float = 0.0) -> Call:
        """Some looks of a new process that watches `stable` into a folder. Raises Violation as `pull`."""
        folder = self.folders[number]
        look = folder.process()
        for _ in range(looks):
            call = self.world.call(f"watch into folder {number}", look)
            states = self.rules.states_between(f"{MODEL}:stable", call.began, call.ended or 0)
            if call.acknowledged and call.result not in {state.served_to(folder.node).version for state in states}:
                raise Violation(f"{call.what} gave {call.result}, which the channel did not serve")
            self.world.sleep(pause)
        return call

    def start(self, version: str, plan: RolloutPlan = PLAN) -> Call:
        """Start a rollout in waves to stable."""

        number = self._number()

        def work() -> str:
            decided_on, manifest = self._decide(number, "stable"), lookup.load(self.store, MODEL, version)
            operator = self._operator(number)
            return operations.start(self.store, manifest, "stable", plan, operator, decided_on=decided_on).id

        call = self.world.call(f"rollout start {version}", work)
        return self._took_effect(call, "stable", lambda state: _decided(state, "started", number))

    def abort(self) -> Call:
        """Abort the rollout that runs; what nodes get from then on is checked when they look."""

        number = self._number()

        def work() -> str:
            return operations.abort(self.store, MODEL, "stable", self._operator(number)).id

        call = self.world.call("rollout abort", work)
        return self._took_effect(call, "stable", lambda state: _decided(state, "aborted", number))

    def pause(self, lasts_s: float = 0.0) -> Call:
        """Pause the rollout and resume it so many seconds later."""

        number = self._number()

        def work() -> None:
            operations.pause(self.store, MODEL, "stable", self._operator(number))
            self.world.sleep(lasts_s)
            operations.resume(self.store, MODEL, "stable", self._operator(number))

        call = self.world.call("rollout pause, resume", work)
        return self._took_effect(call, "stable", lambda state: _decided(state, "resumed", number))

    def resume(self) -> None:
        """Resume a rollout that somebody who is gone had paused."""
        running_rollout = channel_writes.read_rollout(self.store, MODEL, "stable")
        if running_rollout and running_rollout.state == "paused":
            operations.resume(self.store, MODEL, "stable", self._operator(self._number()))

    def advance(self) -> Call:
        """One look of a controller at all that runs."""

        messages: list[str] = []
        call = self.world.call(
            "controller looks", lambda: (RolloutFollower(self.store, None, messages.append).look(), messages)
        )
        for ended in ("done", "halted", "aborted"):
            if any(line.startswith(f"{MODEL}:stable: {ended}:") for line in messages):
                self._took_effect(call, "stable", lambda state, ended=ended: _is(state, ended))
        return call

    def report(self, failure: str) -> Call:
        """Three nodes report of the rollout that runs."""

        def work() -> int:
            running_rollout = channel_writes.read_rollout(self.store, MODEL, "stable")
            for node in NODES[:3] if running_rollout else ():
                time = format_time(self.store.now())
                report = NodeReport(node.name, "", running_rollout.version, time, time, failure)  # type: ignore[union-attr, arg-type]
                key = report_key(MODEL, "stable", running_rollout.id, node.name)  # type: ignore[union-attr]
                write_report(self.store, key, report, self.store.read(key))
            return len(NODES)

        return self.world.call(f"nodes report {failure or 'well'}", work)

    def report_outside(self, number: int) -> Call:
        """A node reports outside of a rollout, by which a collection sets how many shall."""

        def work() -> str:
            time, node = format_time(self.store.now()), NODES[number].name
            key = report_key(MODEL, "stable", OUTSIDE, node)
            write_report(self.store, key, NodeReport(node, "", "1", time, time), self.store.read(key))
            return node

        return self.world.call(f"node {number} reports outside", work)

    def _operator(self, number: str) -> operations.Operator:
        return operations.Operator(number, self.store.now())

    def _number(self) -> str:
        """What tells the moves of two calls apart."""
        return f"{self.world.name} {len(self.world.calls)}"


def _decided(state: Channel, what: str, number: str) -> bool:
    """Whether a state's rollout has a decision of this call."""
    history = state.rollout.history if state.rollout else ()
    return any(item.by == number and item.what.startswith(what) for item in history)


def _is(state: Channel, ended: str) -> bool:
    return state.rollout is not None and state.rollout.state == ended
