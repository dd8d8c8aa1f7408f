"""What a verification finds: problems, some of which are faults."""

from collections.abc import Callable
from dataclasses import dataclass, field

from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store

FAULTS = ("missing", "corrupt", "size", "blake3", "edited", "misplaced", "dangling", "signature", "stale")
# What a channel's snapshot is called among the things that a blob is part of.
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. what: a digest, reference, key or path.  affects: what it was published as part of."""

    kind: str
    what: str
    detail: str
    affects: tuple[str, ...] = ()

    @property
    def fault(self) -> bool:
        """Whether something published cannot be served as it was."""
        return self.kind in FAULTS


@dataclass(frozen=True)
class Verification:
    """What was read and what was found wrong. size_bytes: of all blobs that were read."""

    problems: tuple[Problem, ...]
    versions: int
    blobs: int
    size_bytes: int

    @property
    def sound(self) -> bool:
        """Whether everything published can be served as it was."""
        return not any(problem.fault for problem in self.problems)


@dataclass
class Findings:
    """What a verification has found so far. needed: digest -> what it is part of.  unread: whether a manifest could not
    be read.  blake3: digest -> reference -> the digest that it claims."""

    store: Store
    progress: Callable[[str], None]
    problems: list[Problem] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    needed: dict[str, list[str]] = field(default_factory=dict)
    blake3: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: bool = False
    blobs: int = 0
    size_bytes: int = 0

    def add(self, kind: str, what: str, detail: str, affects: tuple[str, ...] = ()) -> None:
        """Add a problem."""
        self.problems.append(Problem(kind, what, detail, affects))

    def close(self) -> Verification:
        """The result."""
        return Verification(tuple(self.problems), len(self.manifests), self.blobs, self.size_bytes)
