"""What users and programs do to a registry, as actors that run the product's own code."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from enginery.client.locate import VersionLocator
from enginery.core.digest import digest_of
from enginery.core.errors import UnknownNameError
from enginery.core.names import parse_reference
from enginery.registry import pins
from enginery.registry.collection.references import Rules as Kept
from enginery.registry.gc import collect
from enginery.registry.manifest import Manifest
from enginery.registry.verification.repair import repair
from enginery.registry.verification.verify import verify
from enginery.registry.versions import channels, lookup
from enginery.registry.versions.publish import publish
from tests.enginery import registries
from tests.simulation.rules import Rules
from tests.simulation.store import SimulatedStore
from tests.simulation.world import Call, Violation, World

MODEL = "digits"
GRACE = timedelta(minutes=30)


@dataclass
class Registry:
    """A simulated registry, and its rules."""

    world: World
    store: SimulatedStore
    rules: Rules

    def publish(self, content: str, version: str | None = None) -> Call:
        """Publish a version with one engine of its own."""

        def work() -> str:
            entry = registries.engine(self.store, data=f"engine {content}".encode())
            draft = registries.draft(self.store, content, MODEL)
            return publish(self.store, draft, [(entry, registries.approval(entry))], wanted_version=version).version

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
            "gc", lambda: len([i for i in collect(self.store, Kept(1, 0), GRACE, delete=True).items if i.state == "deleted"])
        )

    def repair(self) -> Call:
        """Verify all, and mend what is found."""

        def work() -> tuple[str, ...]:
            found = verify(self.store)
            repair(self.store, found)
            return tuple(f"{item.kind} {item.what}" for item in found.problems if item.fault or item.kind == "unsettled")

        return self.world.call("verify --repair", work)

    def pin(self, version: str) -> Call:
        """Pin a version."""
        return self.world.call(f"pin {version}", lambda: pins.pin(self.store, lookup.load(self.store, MODEL, version)))

    def unpin(self, version: str) -> Call:
        """Take a pin away."""
        return self.world.call(f"unpin {version}", lambda: pins.unpin(self.store, MODEL, version))

    def pull(self, reference: str) -> Call:
        """Locate a version and read its engine, as a node does. Raises Violation for an answer that was never right."""

        def work() -> str:
            located = VersionLocator(self.store).locate(parse_reference(reference))
            for entry in located.manifest.engines:
                self.store.read_blob(str(entry.digest))
            return located.manifest.digest

        call = self.world.call(f"pull {reference}", work)
        if call.acknowledged and ":" in reference:
            right = self.rules.served_between(reference, call.began, call.ended or 0)
            if call.result not in right:
                raise Violation(f"{call.what} gave {str(call.result)[:12]}, and the channel served {sorted(d[:12] for d in right)}")
        return call

    def _number(self) -> str:
        """What tells the moves of two calls apart."""
        return f"{self.world.name} {len(self.world.calls)}"
