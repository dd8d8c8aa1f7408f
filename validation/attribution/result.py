"""What attribution found: a ranked table, and what it rests on. Plain values with the names of the kept JSON.

`core.codec` writes and reads them (`encode_document`: an error of nothing at all is 'inf' decibels). No numpy here:
a registry reads attributions where nothing is measured.

The attributions of a version: which node drifted, per graph and engine that failed, kept as blobs beside them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from enginery.core import parsing
from enginery.core.codec import OMIT_NONE, decode
from enginery.core.errors import IntegrityError
from enginery.core.reports.proof import Check
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store

# Rows that are kept.
MOST_ROWS = 400

# blamed: segments break the stage's limits by themselves.  spread: none does, their errors add up.
# nothing-failed: the outputs keep the limits.
Finding = Literal["blamed", "spread", "nothing-failed"]


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is off. sqnr_db: inf when it is equal.  note: why there is no number.

    slice_sqnr_db, slice: of its worst slice, and which that is.
    """

    sqnr_db: float = math.inf
    max_rel: float = 0.0
    nonfinite: int = 0
    unequal: float = 0.0
    note: str = ""
    slice_sqnr_db: float = math.inf
    slice: str = ""

    @property
    def rank(self) -> tuple[float, ...]:
        """Worst first."""
        return (-bool(self.note), -min(self.nonfinite, 1), -self.unequal, self.sqnr_db)


@dataclass(frozen=True)
class SegmentRow:
    """One segment. tensor: what it ends in.  node, op_type: what it is named after, in the original's names.

    nodes: of the original.  computed_by: nodes of the candidate.  blamed: why its own error breaks a limit, or ''.
    """

    tensor: str
    node: str
    op_type: str
    local: TensorError
    inherited: TensorError
    blamed: str
    nodes: tuple[str, ...]
    computed_by: tuple[str, ...]


@dataclass(frozen=True)
class Taps:
    """Whether tapping changed the outputs. changed: output -> how far the tapped run is from the untapped one."""

    compared: int = 0
    changed: Mapping[str, TensorError] = field(default_factory=dict)


@dataclass(frozen=True)
class ProposedOverride:
    """A rule for the spec's `quantization.overrides`."""

    match: str
    precision: str


@dataclass(frozen=True)
class CheckChange:
    """A check of the graph as it is, and with the proposal; None where that was not measured."""

    before: Check
    after: Check | None


@dataclass(frozen=True)
class Proposal:
    """Groups of nodes to leave in float. groups: that could be.  runs: graphs that were tried.

    leave: the nodes of each chosen group; None where no choice passed, and then there is nothing more.
    minimal: whether each was shown to be needed.  overrides, snippet: the rules, and as YAML for the spec.
    searched: whether a search wrote the graph, which these rules will run again.
    """

    groups: int
    runs: int
    minimal: bool
    leave: tuple[tuple[str, ...], ...] | None
    overrides: tuple[ProposedOverride, ...] | None = field(default=None, metadata=OMIT_NONE)
    snippet: str | None = field(default=None, metadata=OMIT_NONE)
    quality: tuple[CheckChange, ...] | None = field(default=None, metadata=OMIT_NONE)
    searched: bool = False


@dataclass(frozen=True)
class Attribution:
    """Rows ranked by their own error, worst first. joint: the stage, 'quantization' or 'engine'.

    failed: the checks that broke their limit, in words.  cases: golden cases that it was measured on, worst first.
    points: tensors where both could be cut; cut: where they were.  segments: the number of all rows, of which the worst
    are kept.  notes: for people.
    """

    joint: str
    precision: str
    finding: Finding
    rows: tuple[SegmentRow, ...]
    taps: Taps
    failed: tuple[str, ...]
    cases: tuple[str, ...]
    points: int
    cut: int
    segments: int
    notes: tuple[str, ...] = ()
    proposal: Proposal | None = None
    format: Literal[1] = 1

    @property
    def blamed(self) -> tuple[SegmentRow, ...]:
        """The segments that break a limit by themselves."""
        return tuple(row for row in self.rows if row.blamed)


@dataclass(frozen=True, kw_only=True)
class NamedAttribution(Attribution):
    """An attribution as a page has it. name: of the graph or unit.  units: that it is about."""

    name: str
    units: tuple[str, ...]


def rank_segments(rows: Sequence[SegmentRow]) -> tuple[SegmentRow, ...]:
    """Worst own error first; among equals, in the model's order."""
    return tuple(sorted(rows, key=lambda row: row.local.rank))


# The manifest's sources of this name, with the graph or the unit behind it, are attributions.
ATTRIBUTION = "attribution"
MAX_BYTES = 64 << 20


def attributions(store: Store, manifest: Manifest) -> dict[str, Attribution]:
    """Attribution by the name of the graph or unit. Raises IntegrityError."""
    start = f"{ATTRIBUTION} "
    names = {name.removeprefix(start): digest for name, digest in manifest.sources.items() if name.startswith(start)}
    return {name: read_attribution(store, digest) for name, digest in sorted(names.items())}


def read_attribution(store: Store, digest: str) -> Attribution:
    """One of them. Raises IntegrityError for a damaged blob and another format."""
    try:
        return decode(parsing.parse_json(store.read_blob(digest), MAX_BYTES), Attribution)
    except IntegrityError as error:
        raise IntegrityError(f"blob {digest} is no attribution: {error}; run `enginery attribute` again") from error
