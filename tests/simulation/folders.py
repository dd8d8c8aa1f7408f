"""Folders that nodes watch a channel into: real files, in memory where the system has a place for that."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enginesmith.client.locate import DocumentMemory, VersionLocator
from enginesmith.client.pull import BlobFetcher
from enginesmith.client.resolve import Policy
from enginesmith.client.watching.watch import ChannelWatcher
from enginesmith.core.errors import digest_of_file
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.registry.rollouts.rollout_state import ServingNode
from tests.simulation.store import SimulatedStore
from tests.simulation.world import Violation

_IN_MEMORY = Path("/dev/shm")


@dataclass
class Folder:
    """A folder that one node watches a channel into. path: made at the first look."""

    store: SimulatedStore
    reference: Reference
    node: ServingNode | None
    path: Path | None = None

    def process(self) -> Callable[[], str]:
        """A look of a new process, which remembers what it saw and returns the version that is served then. Each change
        of a file is a step at which the process may be killed; then it changes no file any more."""
        if self.path is None:
            self.path = Path(tempfile.mkdtemp(prefix="watched-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        memory = DocumentMemory()
        watcher = ChannelWatcher(
            lambda: VersionLocator(self.store, memory=memory, node=self.node),
            self.reference,
            [Machine()],
            self.path,
            policy=Policy(),
            fetcher=BlobFetcher,
            say=lambda _: None,
        )

        def look() -> str:
            with self.store.world.each_step(self.check):
                return watcher.once().version

        return look

    def check(self) -> None:
        """Raise Violation unless the folder leads to nothing, or to a whole engine and its description."""
        current_path = self.path and self.path / "current"
        if not current_path or not os.path.lexists(current_path):
            return
        paths = sorted(current_path.glob("*.json"))
        if len(paths) != 1:
            raise Violation(f"a watched folder has {len(paths)} descriptions")
        described_document = json.loads(paths[0].read_bytes())
        engine = current_path / described_document["file"]
        if not engine.is_file() or digest_of_file(engine) != described_document["digest"]:
            raise Violation(f"a watched folder has no whole engine of {described_document['version']}")
