"""What attribution found, as plain values with the names of the kept JSON; and the attributions of a version.

`core.codec` writes and reads them (`encode_document`; the SQNR of no error is 'inf'). Without numpy, because a
registry reads attributions where nothing is measured.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from enginesmith.core import parsing
from enginesmith.core.codec import OMIT_NONE, decode, encode_document
from enginesmith.core.errors import IntegrityError, UndecidedError
from enginesmith.core.reports.proof import Check
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import attribution_key, evidence_prefix

# Rows that a version keeps of an attribution.
MOST_ROWS = 400
# The remedy where the time was over.
MORE_TIME = "raise timeouts.attribution_s in the spec for more"
# blamed: segments break the stage's limits by themselves.  spread: none does, their errors add up.
# nothing-failed: the outputs keep the limits.
Finding = Literal["blamed", "spread", "nothing-failed"]


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is off. sqnr_db: in decibels, inf without error.  max_rel: relative to the peak.

    nonfinite: elements that are NaN or infinite and should not be.  unequal: share of unequal integers.  note: why
    there is no number.  slice_sqnr_db, slice: SQNR and name of the worst slice.
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
        """A sort key that puts the worst error first."""
        return (-bool(self.note), -min(self.nonfinite, 1), -self.unequal, self.sqnr_db)


@dataclass(frozen=True)
class SegmentRow:
    """One segment. tensor: the one that it computes.  node, op_type: the reference's node that names it.

    local: its error on the reference's activations.  inherited: the whole candidate's error at the tensor.  blamed: why
    its own error breaks a limit, or ''.  nodes, computed_by: the segment's nodes in the reference and the candidate.
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
    """Whether reading inner tensors changed the outputs. compared: outputs in all runs.  changed: error by output."""

    compared: int = 0
    changed: Mapping[str, TensorError] = field(default_factory=dict)


@dataclass(frozen=True)
class ProposedOverride:
    """A rule for the spec's `quantization.overrides`."""

    match: str
    precision: str


@dataclass(frozen=True)
class CheckChange:
    """A check of the graph as it is, and with the proposal, None where it was not measured."""

    before: Check
    after: Check | None


@dataclass(frozen=True)
class Proposal:
    """Groups of nodes to leave in float. groups: how many there are.  runs: how many graphs were tried.

    leave: the nodes of each chosen group; None where no choice passed, and the fields after `minimal` are empty.
    minimal: whether each was shown to be needed.  overrides, snippet: the rules for the spec, and their YAML.
    searched: whether a quantization search wrote the graph, so that these rules start it again.
    ended_early: whether the runs or the time were over first.
    """

    groups: int
    runs: int
    minimal: bool
    leave: tuple[tuple[str, ...], ...] | None
    overrides: tuple[ProposedOverride, ...] | None = field(default=None, metadata=OMIT_NONE)
    snippet: str | None = field(default=None, metadata=OMIT_NONE)
    quality: tuple[CheckChange, ...] | None = field(default=None, metadata=OMIT_NONE)
    searched: bool = False
    ended_early: bool = False


@dataclass(frozen=True)
class Attribution:
    """Which nodes drifted: segments ranked by their own error, worst first. joint: 'quantization' or 'engine'.

    failed: the failed checks in words.  cases: the golden cases that were measured, worst first.  points: how many
    tensors could be cut.  cut: how many were.  segments: the number of all rows, of which the worst are kept.
    complete: whether the whole model was looked at before the time was over.
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
    complete: bool = True
    format: Literal[1] = 1

    @property
    def blamed(self) -> tuple[SegmentRow, ...]:
        """The segments that break a limit by themselves."""
        return tuple(row for row in self.rows if row.blamed)


@dataclass(frozen=True, kw_only=True)
class NamedAttribution(Attribution):
    """An attribution of a version's page. name: of the graph or unit.  units: those that it is about."""

    name: str
    units: tuple[str, ...]


def rank_segments(rows: Sequence[SegmentRow]) -> tuple[SegmentRow, ...]:
    """The rows by their own error, worst first; among equals, in the model's order."""
    return tuple(sorted(rows, key=lambda row: row.local.rank))


# Of an attribution's document.
MAX_BYTES = 64 << 20


def attach_attribution(store: Store, manifest: Manifest, found: NamedAttribution) -> None:
    """Store an attribution beside its version, in the place of an older one of the same graph or unit.

    It is made after the version is published, whose manifest does not change.
    """
    key = attribution_key(manifest.model, manifest.version, found.name)
    data = json.dumps(encode_document(found), ensure_ascii=False, allow_nan=False).encode()
    if (before := store.read(key)) != data:
        with suppress(UndecidedError):  # another run's is there
            store.replace(key, data, before)


def attributions(store: Store, manifest: Manifest) -> dict[str, NamedAttribution]:
    """The attributions of a version by the name of their graph or unit. Raises IntegrityError."""
    found = {}
    for key in store.list(evidence_prefix("attributions", manifest.model, manifest.version)):
        try:
            item = decode(parsing.parse_json(store.read(key) or b"", MAX_BYTES), NamedAttribution)
            if attribution_key(manifest.model, manifest.version, item.name) != key:
                raise IntegrityError("it is not the attribution its name says: it was edited by hand or moved")
        except IntegrityError as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; delete it, and build again") from error
        found[item.name] = item
    return dict(sorted(found.items()))


def read_attribution(store: Store, digest: str) -> Attribution:
    """The attribution in a blob. Raises IntegrityError for a damaged one and for another format."""
    try:
        return decode(parsing.parse_json(store.read_blob(digest), MAX_BYTES), Attribution)
    except IntegrityError as error:
        raise IntegrityError(
            f"blob {digest} is no attribution: {error}; run `enginesmith debug attribute` again"
        ) from error
