"""What is known of a compile cache when it is made, and when it is published; apart from what makes it, which imports
numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.core.reports.proof import Approved, Check
from enginesmith.core.requirements import Requirement
from enginesmith.registry.manifest import EngineEntry


@dataclass(frozen=True)
class Maker:
    """The machine and the installation that a cache is made with. toolchain: versions of torch and Triton, and the kind
    of CPU.  requires: what a machine must have that loads the cache.  host: as `describe_host` has it."""

    toolchain: Mapping[str, str]
    requires: tuple[Requirement, ...]
    host: Mapping[str, str]


@dataclass(frozen=True)
class MadeCache:
    """A cache in the store, with the checks of the process that started from it. digest, size_bytes: of its file.

    notes: what both processes used.
    """

    digest: str
    size_bytes: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    maker: Maker


@dataclass(frozen=True)
class JudgedCache:
    """A unit that is a compile cache. entry: as the manifest has it.  proof: of one that may be published."""

    entry: EngineEntry
    proof: Approved | None = None
