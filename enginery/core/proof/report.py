"""What was checked of an engine, and the verdict. Proof is data: only `approve` makes an `Approved`.

A number that JSON cannot hold (NaN, an infinity) is written as the string 'nan', 'inf' or '-inf'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NoReturn, get_args

from enginery.core.digest import digest_of
from enginery.core.errors import IntegrityError
from enginery.core.proof.spread import Spread
from enginery.core.text import pluralize

Verdict = Literal["proven", "unproven", "failed"]
# The check of `validation.data.overlap`, whose value is about the samples and not about a drift.
OVERLAP = "calibration overlap"
_KEY = object()


@dataclass(frozen=True)
class Check:
    """One measured value against its limit; `limit` None means that it was only measured.

    joint: export, quantization, engine or task.  name: the metric.  output: tensor.  case: where it was measured.
    """

    joint: str
    name: str
    output: str
    case: str
    value: float | None
    limit: float | None
    passed: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back, without bare NaN."""
        return {**vars(self), "value": _to_json(self.value), "limit": _to_json(self.limit)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Check":
        """Read what `to_json` wrote. Raises IntegrityError when it is something else."""
        found = _only_fields(cls, data)
        plain = [found[name] for name in ("joint", "name", "output", "case", "note")]
        # What decides whether an engine is proven must be a truth value, and nothing that merely counts as one.
        whole = type(found["passed"]) is bool and _texts(plain)
        try:
            numbers = {name: _from_json(found[name]) for name in ("value", "limit")}
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            raise IntegrityError(
                f"check {str(found['name'])[:80]!r} of a report is not whole; validate the engine again"
            )
        return cls(**{**found, **numbers})


@dataclass(frozen=True)
class Report:
    """All checks of one unit. engine: its digest, None when there is no engine.  golden: digest of the golden set.

    created_at: ISO 8601, UTC.  host: what machine the checks ran on.  versions: of compiler and runtime.
    spreads: how the errors of each joint and output spread, where that was measured.
    """

    unit: str
    target: str
    precision: str
    backend: str
    engine: str | None
    golden: str
    checks: tuple[Check, ...]
    verdict: Verdict
    reason: str
    created_at: str
    host: Mapping[str, str]
    versions: Mapping[str, str]
    spreads: tuple[Spread, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @cached_property
    def digest(self) -> str:
        """Digest of the report's canonical JSON."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back, without bare NaN."""
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "spreads": [spread.to_json() for spread in self.spreads],
            "checks": [check.to_json() for check in self.checks],
            "host": dict(self.host),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Report":
        """Read what `to_json` wrote. Raises IntegrityError when it is something else."""
        found = _only_fields(cls, data)
        if found["verdict"] not in get_args(Verdict):
            raise IntegrityError(
                f"report of {str(found['unit'])[:80]!r} has verdict {str(found['verdict'])[:80]!r}; "
                "validate the engine again"
            )
        plain = [found[name] for name in ("unit", "target", "precision", "backend", "golden", "reason", "created_at")]
        lists = isinstance(found["checks"], list | tuple) and isinstance(found["spreads"], list | tuple)
        mappings = all(isinstance(found[name], Mapping) for name in ("host", "versions"))
        if not (_texts([*plain, found["engine"] or ""]) and lists and mappings):
            raise IntegrityError(f"report of {str(found['unit'])[:80]!r} is not whole; validate the engine again")
        checks = tuple(Check.from_json(item) for item in found["checks"])
        return cls(**{**found, "checks": checks, "spreads": tuple(map(Spread.from_json, found["spreads"]))})


class Approved:
    """A report that allows its engine to be published. There is no way to one but `approve`."""

    __slots__ = ("report",)
    report: Report

    def __init__(self, report: Report, key: object = None) -> None:
        if key is not _KEY:
            raise TypeError("an Approved comes from approve(report) only")
        object.__setattr__(self, "report", report)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an Approved cannot be changed: {name} = {value!r}")


def approve(report: Report) -> Approved | None:
    """The approval of a report, or None: for a failed verdict, a failed check, no engine, or 'proven' by no check."""
    if report.verdict == "failed" or report.failed or report.engine is None:
        return None
    if report.verdict == "proven" and not report.checks:
        return None
    return Approved(report, _KEY)


def judge(checks: Sequence[Check], cannot_run: str | None = None) -> tuple[Verdict, str]:
    """The verdict on an engine and its reason. cannot_run: why it could not be run here; None when it was run."""
    failed = [check for check in checks if not check.passed]
    if failed:
        return "failed", describe(failed[0]) + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
    if cannot_run is not None:
        return "unproven", cannot_run
    if not checks:
        return "failed", "nothing was checked; give golden data"
    return "proven", f"{pluralize(len(checks), 'check')} passed"


def describe(check: Check) -> str:
    """One line for people: 'engine sqnr_db of logits at golden: 12.1, limit 22'."""
    value = "" if check.value is None else f": {check.value:.4g}"
    limit = "" if check.limit is None else f", limit {check.limit:.4g}"
    note = f" ({check.note})" if check.note else ""
    where = f" of {check.output}" if check.output else ""
    return f"{check.joint} {check.name}{where} at {check.case}{value}{limit}{note}"


def _to_json(value: float | None) -> float | str | None:
    return str(float(value)) if value is not None and not math.isfinite(value) else value


def _from_json(value: Any) -> float | None:
    return float(value) if value is not None else None


def _texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _only_fields(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise IntegrityError(f"a {cls.__name__} is an object; found {str(data)[:80]!r}")
    names = [item.name for item in fields(cls)]
    if sorted(data) != sorted(names):
        raise IntegrityError(f"a {cls.__name__} has the fields {', '.join(names)}; found {', '.join(sorted(data))}")
    return dict(data)
