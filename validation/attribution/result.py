"""The result of an attribution, as a value and as text."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from enginesmith.core import parsing
from enginesmith.core.codec import decode, document_error, encode_document, explain_damage
from enginesmith.core.errors import IntegrityError, UndecidedError
from enginesmith.core.parsing import Malformed
from enginesmith.core.reports.proof import Check, describe
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import attribution_key, evidence_prefix

# The result of an attribution as plain values with the field names of the stored JSON, and its storage beside a
# version. `core.codec` writes and reads it (`encode_document`; an SQNR without an error is 'inf'). No numpy: machines
# that measure nothing read attributions too.

# The most rows of an attribution that a version stores.
MOST_ROWS = 400
# The remedy if the time ran out.
MORE_TIME = "raise timeouts.attribution_s in the spec for more"
# blamed: some segments break the stage's limits alone.  spread: no segment does; the errors of all add up.
# nothing-failed: the outputs keep the limits.
Finding = Literal["blamed", "spread", "nothing-failed"]


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor. sqnr_db: inf without an error.  max_rel: greatest error over the peak of the tensor.

    nonfinite: number of elements that are NaN or infinite and should not be.  unequal: share of unequal integers.
    note: the reason if there are no numbers.  slice_sqnr_db, slice: SQNR and name of the worst slice.
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
    """One segment, which computes `tensor`. node, op_type: the reference's node after which the segment is named.

    local: the error on the reference's activations.  inherited: the error of the whole candidate at the tensor.
    blamed: why the segment is blamed, or ''.  nodes, computed_by: its nodes in the reference and the candidate.
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
    """Whether reading inner tensors changed the outputs. compared: outputs over all runs.  changed: error by output."""

    compared: int = 0
    changed: Mapping[str, TensorError] = field(default_factory=dict)


@dataclass(frozen=True)
class ProposedOverride:
    """A rule for the spec's `quantization.overrides`."""

    match: str
    precision: str


@dataclass(frozen=True)
class CheckChange:
    """One check of the graph without and with the proposal. after: None if it was not measured."""

    before: Check
    after: Check | None


@dataclass(frozen=True)
class Proposal:
    """Groups of nodes to leave in float. groups: number of all groups.  runs: number of graphs that were tried.

    leave: the nodes of each chosen group. If no choice passed, `leave`, `overrides`, `snippet` and `quality` are None.
    minimal: whether every chosen group is needed.  overrides, snippet: rules for the spec, and their YAML.
    searched: whether a quantization search wrote the graph; the rules then start the search again.
    ended_early: whether the search stopped for lack of runs or time.
    quality: the checks without and with the proposal.
    """

    groups: int
    runs: int
    minimal: bool
    leave: tuple[tuple[str, ...], ...] | None
    overrides: tuple[ProposedOverride, ...] | None = None
    snippet: str | None = None
    quality: tuple[CheckChange, ...] | None = None
    searched: bool = False
    ended_early: bool = False


@dataclass(frozen=True)
class Attribution:
    """The segments of a model ranked by their own error, worst first. stage: 'quantization' or 'engine'.

    cases: names of the golden cases that were measured, worst first.  points: number of tensors where the model can be
    cut.  cut: number of cuts.  segments: number of segments; only the worst are in `rows`.
    complete: whether the whole model was measured in the time.
    finding: the conclusion from the ranking.  failed: the failed checks.
    taps: the effect of reading inner tensors.  proposal: nodes to leave in float; None if no proposal was sought.
    """

    stage: str
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
    """An attribution as a version's page shows it. name: of the graph or unit.  units: names of the units concerned."""

    name: str
    units: tuple[str, ...]


def rank_segments(rows: Sequence[SegmentRow]) -> tuple[SegmentRow, ...]:
    """The rows sorted by their own error, worst first; rows with equal errors stay in the order of the model."""
    return tuple(sorted(rows, key=lambda row: row.local.rank))


# The greatest size of an attribution's document.
MAX_BYTES = 64 << 20


def attach_attribution(store: Store, manifest: Manifest, attribution: NamedAttribution) -> None:
    """Store an attribution beside its version; it replaces an older one of the same graph or unit.

    An attribution is made after the version is published, and does not change the version's manifest.
    """
    key = attribution_key(manifest.model, manifest.version, attribution.name)
    document = json.dumps(encode_document(attribution), ensure_ascii=False, allow_nan=False).encode()
    if (current := store.read(key)) != document:
        with suppress(UndecidedError):  # another run stored its own
            store.replace(key, document, current)


def attributions(store: Store, manifest: Manifest) -> dict[str, NamedAttribution]:
    """The attributions of a version by the name of their graph or unit. Raises IntegrityError if one is damaged."""
    entries = {}
    for key in store.list(evidence_prefix("attributions", manifest.model, manifest.version)):
        with explain_damage(f"{key} of {store.uri}", "delete it, and build again"):
            attribution = decode(parsing.parse_json(store.read(key) or b"", MAX_BYTES), NamedAttribution)
            if attribution_key(manifest.model, manifest.version, attribution.name) != key:
                raise Malformed("its content belongs to another key: it was edited by hand or moved")
        entries[attribution.name] = attribution
    return dict(sorted(entries.items()))


def read_attribution(store: Store, digest: str) -> Attribution:
    """The attribution in a blob. Raises IntegrityError for a damaged blob and for another format."""
    try:
        return decode(parsing.parse_json(store.read_blob(digest), MAX_BYTES), Attribution)
    except IntegrityError as error:
        remedy = "run `enginesmith debug attribute` again"
        raise document_error(f"blob {digest} is not an attribution", error, remedy) from error


# The result of an attribution as text: a headline, a table, the proposal; and its section of an HTML page.

COLUMNS = ("#", "node", "op", "own error", "total", "tensor", "why")
SHOWN = 12


def summarize(attribution: Attribution) -> str:
    """The finding in one line."""
    suffix = "" if attribution.complete else " (the time limit ended before the whole model was ranked)"
    return f"{_summarize(attribution)}{suffix}"


def _summarize(attribution: Attribution) -> str:
    if attribution.finding == "nothing-failed":
        return f"no golden case fails at the {attribution.stage} stage by itself; all parts are ranked"
    if attribution.finding == "spread":
        worst_row = attribution.rows[0]
        summary = f"no node breaks a limit by itself: the errors of {attribution.segments} parts add up"
        return f"{summary}; the largest is {worst_row.node}'s ({worst_row.op_type}, {format_error(worst_row.local)})"
    blamed_row = attribution.blamed[0]
    others_text = f", and {len(attribution.blamed) - 1} more" if len(attribution.blamed) > 1 else ""
    return f"{blamed_row.node} ({blamed_row.op_type}): {blamed_row.blamed}{others_text}"


def describe_taps(attribution: Attribution) -> str:
    """One line: whether reading inner tensors changed the outputs."""
    if not attribution.taps.compared:
        return "the candidate did not run, so it is not known whether tapping changes its outputs"
    if not attribution.taps.changed:
        return f"tapping changed no bit of the outputs ({attribution.taps.compared} compared)"
    changes_text = ", ".join(f"{name} by {format_error(error)}" for name, error in attribution.taps.changed.items())
    return f"tapping changed the outputs ({changes_text}): the ranking is of the tapped model"


def describe_attribution(attribution: Attribution) -> Iterator[str]:
    """The lines beside the table: headline, failed checks, cuts and cases, the proposal."""
    yield summarize(attribution)
    yield from (f"failed: {text}" for text in attribution.failed)
    yield f"cut at {attribution.cut} of {attribution.points} common tensors; measured on {', '.join(attribution.cases)}"
    yield describe_taps(attribution)
    yield from attribution.notes
    if attribution.proposal is not None:
        yield from describe_proposal(attribution.proposal)


def format_row(index: int, row: SegmentRow) -> tuple[str, ...]:
    """The texts of a row of the table, in the order of COLUMNS. index: from 0."""
    suffix = f" + {len(row.nodes) - 1}" if len(row.nodes) > 1 else ""
    local_text, inherited_text = format_error(row.local), format_error(row.inherited)
    return str(index + 1), f"{row.node}{suffix}", row.op_type, local_text, inherited_text, row.tensor, row.blamed


def format_error(error: TensorError) -> str:
    """An error as short text: the number of non-finite elements, the share of unequal ones, or the SQNR."""
    if error.note:
        return "no result"
    if error.nonfinite:
        return f"{error.nonfinite} not finite"
    if error.unequal:
        return f"{error.unequal:.2%} unequal"
    return "exact" if error.sqnr_db == math.inf else f"{error.sqnr_db:.1f} dB"


def describe_proposal(proposal: Proposal) -> Iterator[str]:
    """The lines of a proposal: how many groups to leave in float, the checks before and after, YAML for the spec."""
    if proposal.leave is None and proposal.ended_early:
        yield f"no proposal yet: {proposal.runs} graphs were run, and none of them passed; {MORE_TIME}"
        return
    if proposal.leave is None:
        yield (
            f"no proposal: none of {proposal.runs} graphs with some of the {proposal.groups} groups in float passed; "
            "the error does not come from these groups alone"
        )
        return
    certainty_text = "no group can be left out" if proposal.minimal else "a smaller set was not ruled out in the time"
    group_text = f"{len(proposal.leave)} of {proposal.groups} groups"
    yield f"with {group_text} in float the graph passes ({proposal.runs} graphs tried; {certainty_text})"
    for change in proposal.quality or ():
        new_value = change.after.value if change.after else None
        yield f"  {describe(change.before)} -> {'not measured' if new_value is None else f'{new_value:.4g}'}"
    if proposal.searched:
        yield "  the quantization search will run again with these rules and may choose another graph"
    yield from (proposal.snippet or "").splitlines()


def view_attribution(attribution: NamedAttribution) -> dict[str, object]:
    """The values of `attribution.html.j2` for the attribution of one graph or engine."""
    rows = [dict(zip(COLUMNS, format_row(*pair), strict=True)) for pair in enumerate(attribution.rows[:SHOWN])]
    snippet = (attribution.proposal.snippet if attribution.proposal else None) or ""
    lines = tuple(describe_attribution(attribution))[1:]
    return {
        "name": attribution.name,
        "units": attribution.units,
        "headline": summarize(attribution),
        "lines": lines[: len(lines) - len(snippet.splitlines())],
        "snippet": snippet,
        "rows": rows,
        "more": max(0, attribution.segments - len(rows)),
    }
