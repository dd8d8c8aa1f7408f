"""`build --all` and `plan --all`: every spec of a folder, a bucket or the registry."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from enginesmith.cli.options import emit_json, say
from enginesmith.cli.tables import print_table
from enginesmith.core.codec import encode
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.cli.run_options import shown_progress

if TYPE_CHECKING:
    from pipeline.orchestration.run import RunOptions


def build_all(place: str, options: "RunOptions", quiet: bool, as_json: bool) -> int:
    """Build every spec in `place`, print a row for each, and return the exit code: 1 if a spec or an engine failed.

    place: a folder, a file:// URI, a prefix of a bucket, or 'registered': the newest spec of each model in the
    registry.
    """
    from pipeline.compile.composition import InProcess
    from pipeline.orchestration.catalog import compile_all, gather_specs, words
    from pipeline.orchestration.run import start_executors

    options = replace(options, registry=options.registry or DEFAULT_REGISTRY)
    with (
        gather_specs(place, options.registry) as addresses,
        shown_progress(quiet) as progress,
        start_executors(options) as executors,
    ):
        rows = compile_all(addresses, options, InProcess(), progress, executors)
    if as_json:
        emit_json(encode(rows))
    else:
        table_rows = [
            [
                *(row.spec, row.model or "", row.state, row.version or ""),
                ", ".join(f"{count} {status}" for status, count in row.engines.items()),
                row.reason,
            ]
            for row in rows
        ]
        print_table(("spec", "model", "state", "version", "engines", "reason"), table_rows)
        say(words(rows))
    return 0 if all(row.good for row in rows) else 1


def plan_all(place: str, options: "RunOptions", as_json: bool) -> int:
    """Print for each spec in `place` how many units would be built, as far as that is on record; run nothing.

    Returns the exit code: 1 if a spec cannot be planned, a unit of it has failed, or all of them are refused.
    """
    from pipeline.orchestration.catalog import gather_specs, plan_catalog, summarize

    options = replace(options, registry=options.registry or DEFAULT_REGISTRY)
    with gather_specs(place, options.registry) as addresses:
        rows = plan_catalog(addresses, options)
    if as_json:
        emit_json(encode(rows))
    else:
        table_rows = [
            [
                *(row.spec, row.model or "", ", ".join(f"{count} {action}" for action, count in row.units.items())),
                row.reason or ", ".join(row.missing),
            ]
            for row in rows
            if not row.settled
        ]
        if table_rows:
            print_table(("spec", "model", "units", "missing results, or error"), table_rows)
        say(summarize(rows))
    return int(any(row.reason or is_stuck(row.units) for row in rows))


def is_stuck(counts: Mapping[str, int]) -> bool:
    """Whether a plan has units that have failed, or nothing but refusals. counts: of units by action."""
    return counts.get("failed", 0) > 0 or counts.get("refused", 0) == sum(counts.values()) > 0
