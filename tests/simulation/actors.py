"""What users and programs do to a registry, as actors that run the product's own code."""

from dataclasses import dataclass, field
from datetime import timedelta

from enginesmith.client.locate import VersionLocator
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry import registered_specs
from enginesmith.registry.collection.references import Rules as Kept
from enginesmith.registry.gc import collect
from enginesmith.registry.rollouts.reports import NodeReport, report_key, write_report
from enginesmith.registry.rollouts.state import Gates, RolloutPlan, ServingNode, Slice, format_time
from enginesmith.registry.verification.verify import repair, verify
from enginesmith.registry.versions import channel_writes, channels, lookup
from enginesmith.registry.versions.publish import publish
from pipeline.rollout import operations
from pipeline.rollout.advance import RolloutFollower
from tests.enginesmith import registries
from tests.simulation.folders import Folder
from tests.simulation.rules import Rules
from tests.simulation.store import SimulatedStore
from tests.simulation.world import Call, Violation, World

MODEL = "digits"
GRACE = timedelta(minutes=30)
NODES = tuple(ServingNode(f"node-{number}") for number in range(8))
PLAN = RolloutPlan((Slice(500_000), Slice(1_000_000)), (600, 600), Gates(health_ppm=900_000))


@dataclass
class Registry:
    """A simulated registry, and its rules. site: the registry of another site, where there is one.  folders: that nodes
    watch `stable` into."""

    world: World
    store: SimulatedStore
    rules: Rules
    site: "Registry | None" = None
    folders: list[Folder] = field(default_factory=list)

    def publish(self, content: str, version: str | None = None) -> Call:
        """Publish a version with one engine of its own, which moves the channel candidate."""
        number = self._number()

        def work() -> str:
            entry = registries.engine(self.store, data=f"engine {content}".encode())
            draft = registries.draft(self.store, content, MODEL)
            pairs = [(entry, registries.approval(entry))]
            return publish(self.store, draft, pairs, wanted_version=version, why=number).version

        return self.world.call(f"publish {content}", work)

    def promote(self, version: str, channel: str = "stable") -> Call:
        """Point a channel at a version."""
        number = self._number()

        def work() -> str:
            manifest = lookup.load(self.store, MODEL, version)
            channels.promote(self.store, manifest, channel, why=number)
            return manifest.digest

        return self.world.call(f"promote {version} {channel}", work)

    def rollback(self, channel: str = "stable") -> Call:
        """Point a channel at what it served before."""
        number = self._number()
        return self.world.call(
            f"rollback {channel}", lambda: channels.rollback(self.store, MODEL, channel, why=number).manifest
        )

    def collect(self) -> Call:
        """Collect garbage, as a nightly job does."""
        return self.world.call(
            "gc",
            lambda: len([i for i in collect(self.store, Kept(1, 0), GRACE, delete=True).items if i.state == "deleted"]),
        )

    def repair(self) -> Call:
        """Verify all, and mend what is found."""

        def work() -> tuple[str, ...]:
            found = verify(self.store)
            repair(self.store, found)
            return tuple(
                f"{item.kind} {item.what}" for item in found.problems if item.fault or item.kind == "unsettled"
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
            located = VersionLocator(self.store, node=node).locate(parse_reference(reference))
            for entry in located.manifest.engines:
                self.store.read_blob(str(entry.digest))
            return located.manifest.digest

        call = self.world.call(f"pull {reference}{f' by {node.name}' if node else ''}", work)
        if call.acknowledged and ":" in reference:
            right = self.rules.served_between(reference, node, call.began, call.ended or 0)
            if call.result not in right:
                short = sorted(digest[:12] for digest in right)
                raise Violation(f"{call.what} gave {str(call.result)[:12]}, and the channel served {short}")
        return call

    def mirror(self) -> Call:
        """Copy what stable leads to, and the channel's move, to the other site."""
        assert self.site is not None
        dest, stable = self.site.store, [parse_reference(f"{MODEL}:stable")]
        return self.world.call("mirror", lambda: mirror(self.store, stable, dest, with_channels=True).versions)

    def watch(self, number: int) -> Call:
        """A look of a node that watches `stable` into a folder, as a new process."""
        return self.world.call(f"watch into folder {number}", self.folders[number].look)

    def start(self, version: str) -> Call:
        """Start a rollout in waves to stable."""

        def work() -> str:
            manifest = lookup.load(self.store, MODEL, version)
            return operations.start(self.store, manifest, "stable", PLAN, self._operator()).id

        return self.world.call(f"rollout start {version}", work)

    def abort(self) -> Call:
        """Abort the rollout that runs; what nodes get from then on is checked when they look."""

        def work() -> str:
            return operations.abort(self.store, MODEL, "stable", self._operator()).id

        return self.world.call("rollout abort", work)

    def pause(self) -> Call:
        """Pause the rollout and resume it."""

        def work() -> None:
            operations.pause(self.store, MODEL, "stable", self._operator())
            operations.resume(self.store, MODEL, "stable", self._operator())

        return self.world.call("rollout pause, resume", work)

    def resume(self) -> None:
        """Resume a rollout that somebody who is gone had paused."""
        running = channel_writes.read_rollout(self.store, MODEL, "stable")
        if running and running.state == "paused":
            operations.resume(self.store, MODEL, "stable", self._operator())

    def advance(self) -> Call:
        """One look of a controller at all that runs."""

        def work() -> tuple[str, ...]:
            said: list[str] = []
            RolloutFollower(self.store, None, said.append).look()
            return tuple(said)

        return self.world.call("controller looks", work)

    def report(self, failure: str) -> Call:
        """Three nodes report of the rollout that runs."""

        def work() -> int:
            running = channel_writes.read_rollout(self.store, MODEL, "stable")
            for node in NODES[:3] if running else ():
                at = format_time(self.store.now())
                report = NodeReport(node.name, "", running.version, at, at, failure)  # type: ignore[union-attr, arg-type]
                key = report_key(MODEL, "stable", running.id, node.name)  # type: ignore[union-attr]
                write_report(self.store, key, report, self.store.read(key))
            return len(NODES)

        return self.world.call(f"nodes report {failure or 'well'}", work)

    def _operator(self) -> operations.Operator:
        return operations.Operator("somebody", self.store.now())

    def _number(self) -> str:
        """What tells the moves of two calls apart."""
        return f"{self.world.name} {len(self.world.calls)}"
