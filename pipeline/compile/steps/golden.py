"""A model's new golden set against the one before it: a change is reported, and refused where the spec froze one."""

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError
from enginesmith.registry.store.base import Store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch
from pipeline.progress.events import Finished
from pipeline.values import LatestGolden

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from validation.golden.change import GoldenChange


def check_frozen(spec: "ModelSpec", golden: str, context: RunContext) -> None:
    """Raise DataError for a golden set that is not the one that the spec has frozen."""
    frozen = spec.golden.frozen if spec.golden else None
    if frozen is not None and frozen != golden:
        raise DataError(
            f"golden.frozen is {frozen[:12]}, but the golden set is now {golden[:12]}: "
            f"{told_change(context.store, frozen, golden)}; put the data and the source back, or accept the change: "
            f"{_format_accept_command(spec, context.store)}"
        )


def settle_golden(spec: "ModelSpec", golden: str, context: RunContext) -> None:
    """Report how the golden set differs from the one before it, and note it as the latest. Raises as `check_frozen`."""
    check_frozen(spec, golden, context)
    before = latest_golden(spec.model, context)
    if before == golden:
        return
    if before is not None:
        change = told_change(context.store, before, golden)
        context.progress.emit(Finished("golden set", reason=change, words=f"changed since the last run: {change}"))
    context.remember("latest-golden", {"model": spec.model}, encode(LatestGolden(golden)), [])


def latest_golden(model: str, context: RunContext) -> str | None:
    """Digest of the golden set that this registry last saw for a model."""
    known = context.recall("latest-golden", {"model": model}, LatestGolden)
    return known.golden if known else None


def golden_change(store: Store, before: str, after: str) -> "GoldenChange":
    """The difference of two golden sets of a registry. Raises DataError for a blob that is none."""
    from validation.golden.change import change
    from validation.golden.golden_set import GoldenSet

    with TemporaryDirectory(prefix="enginesmith-golden-") as folder:
        sets = [GoldenSet.load(fetch(store, digest, Path(folder) / digest)) for digest in (before, after)]
        return change(*sets)


def told_change(store: Store, before: str, after: str) -> str:
    """The difference in words, or that the older set is not in the registry any more."""
    if not store.has(before):
        return f"{before[:12]} is not in this registry, so what differs is not known"
    return str(golden_change(store, before, after))


def _format_accept_command(spec: "ModelSpec", store: Store) -> str:
    """The command that accepts a golden set; where the spec is a copy, the one for where it is kept."""
    where = ["--registry", store.uri.removeprefix("file://")]
    if not spec.is_copy:
        return shlex.join(["enginesmith", "debug", "golden", "accept", spec.address, *where])
    options = shlex.join(where)
    return (
        f"enginesmith debug golden accept SPEC {options} where the spec of {spec.address} is kept, then enginesmith "
        "prefect register "
        "SPEC "
        f"{options}"
    )
