"""What is known of a compile cache when it is published; apart from the step that makes it, which imports numpy."""

from dataclasses import dataclass

from enginery.core.reports.proof import Approved
from enginery.registry.manifest import EngineEntry


@dataclass(frozen=True)
class JudgedCache:
    """A unit that is a compile cache. entry: as the manifest has it.  proof: of one that may be published."""

    entry: EngineEntry
    proof: Approved | None = None
