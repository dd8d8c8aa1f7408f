"""What attribution found: a ranked table, and what it rests on. Kept as JSON with a format version."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from enginery.core.errors import IntegrityError
from validation.metrics.drift import Drift
from validation.metrics.slice_limits import worst_slice

FORMAT = 1
# Rows that are kept.
MOST_ROWS = 400

# blamed: segments break the joint's limits by themselves.  spread: none does, their errors add up.
# nothing-failed: the outputs keep the limits.
Finding = Literal["blamed", "spread", "nothing-failed"]

_PLAIN = ("joint", "precision", "finding", "points", "cut", "proposal")
_LISTS = ("failed", "cases", "notes")


@dataclass(frozen=True)
class Error:
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

    @classmethod
    def of(cls, drift: Drift | None, note: str = "") -> "Error":
        """From a measurement; without one, the note says why."""
        if drift is None:
            return cls(math.nan, math.nan, 0, 0.0, note or "not measured")
        if drift.mismatches is not None:
            return cls(unequal=1 - drift.argmax_agreement, note=note)
        worst = worst_slice(drift.slices, None) if drift.slices else None
        of_slice = (worst.sqnr_db, str(worst)) if worst else (math.inf, "")
        return cls(drift.sqnr_db, drift.max_rel, drift.nonfinite, 0.0, note, *of_slice)

    @property
    def rank(self) -> tuple[float, ...]:
        """Worst first."""
        return (-bool(self.note), -min(self.nonfinite, 1), -self.unequal, self.sqnr_db)

    def to_json(self) -> dict[str, Any]:
        """Numbers that JSON cannot hold as strings, as in `enginery.core.proof.report`."""
        return {name: _to_json(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Error":
        """Read what `to_json` wrote."""
        numbers = {name: float(data[name]) for name in ("sqnr_db", "max_rel", "unequal", "slice_sqnr_db")}
        return cls(**numbers, nonfinite=int(data["nonfinite"]), note=str(data["note"]), slice=str(data["slice"]))


@dataclass(frozen=True)
class Row:
    """One segment. tensor: what it ends in.  node, op_type: what it is named after, in the original's names.

    nodes: of the original.  computed_by: nodes of the candidate.  blamed: why its own error breaks a limit, or ''.
    """

    tensor: str
    node: str
    op_type: str
    local: Error
    inherited: Error
    blamed: str
    nodes: tuple[str, ...]
    computed_by: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {**asdict(self), "local": self.local.to_json(), "inherited": self.inherited.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Row":
        """Read what `to_json` wrote."""
        found: dict[str, Any] = {name: str(data[name]) for name in ("tensor", "node", "op_type", "blamed")}
        found |= {name: Error.from_json(data[name]) for name in ("local", "inherited")}
        found |= {name: tuple(map(str, data[name])) for name in ("nodes", "computed_by")}
        return cls(**found)


@dataclass(frozen=True)
class Taps:
    """Whether tapping changed the outputs. changed: output -> how far the tapped run is from the untapped one."""

    compared: int = 0
    changed: Mapping[str, Error] = field(default_factory=dict)


@dataclass(frozen=True)
class Attribution:
    """Rows ranked by their own error, worst first. joint: 'quantization' or 'engine'.

    failed: the checks that broke their limit, in words.  cases: golden cases that it was measured on, worst first.
    points: tensors where both could be cut; cut: where they were.  notes: for people.
    """

    joint: str
    precision: str
    finding: Finding
    rows: tuple[Row, ...]
    taps: Taps
    failed: tuple[str, ...]
    cases: tuple[str, ...]
    points: int
    cut: int
    notes: tuple[str, ...] = ()
    proposal: Mapping[str, Any] | None = None

    @property
    def blamed(self) -> tuple[Row, ...]:
        """The segments that break a limit by themselves."""
        return tuple(row for row in self.rows if row.blamed)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back; of many rows, the worst."""
        changed = {name: error.to_json() for name, error in self.taps.changed.items()}
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: list(getattr(self, name)) for name in _LISTS},
            "segments": len(self.rows),
            "taps": {"compared": self.taps.compared, "changed": changed},
            "rows": [row.to_json() for row in self.rows[:MOST_ROWS]],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Attribution":
        """Read what `to_json` wrote. Raises IntegrityError for another format, or something else."""
        if data.get("format") != FORMAT:
            raise IntegrityError(f"an attribution of format {data.get('format')!r}; this enginery reads {FORMAT}")
        try:
            changed = {str(name): Error.from_json(item) for name, item in data["taps"]["changed"].items()}
            found: dict[str, Any] = {name: data[name] for name in _PLAIN}
            found |= {name: tuple(map(str, data[name])) for name in _LISTS}
            rows = tuple(Row.from_json(item) for item in data["rows"])
            return cls(**found, rows=rows, taps=Taps(int(data["taps"]["compared"]), changed))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise IntegrityError(f"not an attribution ({error!r}); run `enginery attribute` again") from error


def ranked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Worst own error first; among equals, in the model's order."""
    return tuple(sorted(rows, key=lambda row: row.local.rank))


def _to_json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
