"""The commands of versions: show, verify, promote, rollback."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from enginesmith.cli.options import (
    accept_loss_option,
    command,
    emit,
    emit_json,
    optional_reference_argument,
    random_inputs_option,
    reference_argument,
    say,
    why_option,
)
from enginesmith.cli.tables import echo, print_engines, print_fields, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.names import STABLE, channel_of, parse_channel, parse_reference
from enginesmith.core.parsing import parse_json, read, user
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.text import format_bytes, format_metrics, pluralize
from enginesmith.registry.evidence.canaries import LAYER_COLUMNS, layer_row, layers_of, quantization_records
from enginesmith.registry.manifest import Manifest, functions_of, require_model
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.trust import require
from enginesmith.registry.verification import Repairs, Verification
from enginesmith.registry.verification import repair as repair_store
from enginesmith.registry.verification import verify as verify_store
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import Channel, position_of, read_channel, read_history
from enginesmith.registry.versions.index import VersionStatus, show_version
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.policies import CanaryPass


@command()
@reference_argument
@click.option(
    "--quantization", is_flag=True, help="Show the effect of quantization on each tensor, and the nodes left in float."
)
@click.option(
    "--layers", metavar="UNIT", help="Show the layers and tactics of this engine, as its compiler reports them."
)
@click.option("--diff", "older", metavar="REF2", help="Show what changed from the older version REF2 to REF.")
@click.option("--provenance", is_flag=True, help="Print the stored SLSA provenance statement.")
@click.option("--sbom", is_flag=True, help="Print the stored CycloneDX SBOM of the environment that built the version.")
def show(
    reference: str,
    quantization: bool,
    layers: str | None,
    older: str | None,
    provenance: bool,
    sbom: bool,
    registry: str,
    as_json: bool,
) -> None:
    """Show the version REF and its engines."""
    views = {
        "--diff": older is not None,
        "--quantization": quantization,
        "--layers": layers is not None,
        "--provenance": provenance,
        "--sbom": sbom,
    }
    if len(view_names := [name for name, is_set in views.items() if is_set]) > 1:
        raise click.UsageError(f"{' and '.join(view_names)} show different things: give one of them")
    store = open_store(registry)
    if not view_names:
        version_view = show_version(store, parse_reference(reference))
        emit(as_json, version_view.to_json(), _print_version, version_view)
        return
    manifest = locate(store, parse_reference(reference)).manifest
    if older is not None:
        _show_differences(store, locate(store, parse_reference(older)).manifest, manifest, as_json)
    elif quantization:
        _show_quantization(store, manifest, as_json)
    elif layers is not None:
        _show_layers(store, manifest, layers, as_json)
    else:
        _show_stored(store, manifest, "provenance statement" if provenance else "sbom")


def _print_version(version_view: VersionStatus) -> None:
    _print_heading(version_view)
    print_engines([(engine, {}) for engine in version_view.engines])
    if version_view.attachments:
        echo("\nattachments")
        print_fields(("name", "kind", "size_bytes", "by", "created_at", "measured", "note"), version_view.attachments)
    if version_view.canaries:
        echo("\ncanaries")
        print_fields(("target", "verdict", "against", "unit", "created_at", "report", "reason"), version_view.canaries)
    _print_latencies(version_view.latencies)


def _print_heading(facts: VersionStatus) -> None:
    """Print the facts of a version above its engines."""
    manifest, channels = facts.manifest, ", ".join(facts.channels) or "none"
    echo(f"{manifest.reference}  published {manifest.created_at}  channels: {channels}")
    echo(f"manifest {manifest.digest}")
    if facts.page:
        echo(f"report   {facts.page}")
    for graph_pin in manifest.graphs:
        echo(f"graph    {graph_pin.name}: {graph_pin.reference}")
    for function in functions_of(manifest):
        echo(f"function {function.name}: {function.file}:{function.function}")
    for graph, metrics in sorted(manifest.metrics.items()):
        echo(f"metric   {graph}: " + format_metrics(metrics))


@command()
@optional_reference_argument
@click.option(
    "--repair",
    is_flag=True,
    help="Move corrupt blobs away, so that the next build makes them again, and rewrite the channels' snapshots.",
)
def verify(reference: str | None, repair: bool, registry: str, as_json: bool) -> None:
    """Hash every file of REF, or of the whole registry, and report damage. Exit code 1 if a file is damaged."""
    store = open_store(registry)
    result = verify_store(store, parse_reference(reference) if reference else None)
    repairs = repair_store(store, result) if repair else Repairs()
    if as_json:
        problems = [{**asdict(problem), "fault": problem.fault} for problem in result.problems]
        report = {**asdict(result), "problems": problems, "sound": result.sound}
        emit_json({**report, "moved_away": list(repairs.blobs), "channels_written": list(repairs.channels)})
    else:
        _print_verified(result, repairs)
    if not result.sound:
        raise SystemExit(1)


@command()
@reference_argument
@click.argument("where", metavar="[[NAME:]CHANNEL]", required=False)
@why_option
@click.option(
    "--proven-only", is_flag=True, help="Accept a version with unproven engines, and serve only its proven ones."
)
@click.option(
    "--canary",
    "reports",
    multiple=True,
    type=click.Path(path_type=Path),
    help="report.json of a canary; promote only if it is a PASS of exactly this version; repeatable.",
)
@random_inputs_option
@accept_loss_option
def promote(
    reference: str,
    where: str | None,
    why: str,
    proven_only: bool,
    reports: tuple[Path, ...],
    random_inputs: bool,
    accept_loss: bool,
    registry: str,
    trust: Path | None,
    as_json: bool,
) -> None:
    """Move a channel to the version REF.

    Refused if nodes would lose a target or a precision that the channel serves, unless you pass --accept-loss.

    NAME:CHANNEL: a channel of the same model; CHANNEL alone is enough (default: stable).
    """
    version_reference = parse_reference(reference)
    channel = channel_of(version_reference.model, where) if where else STABLE
    store = open_store(registry)
    located_version = locate(store, version_reference)
    trust_answer = require(store, located_version.manifest, trust)
    manifest = located_version.manifest
    passes: list[CanaryPass] = []
    decided_on = position_of(read_channel(store, manifest.model, channel))
    if reports:
        from pipeline.canary.verdicts import canary_passes

        pass_text, passes = canary_passes(store, manifest, channel, reports, say)
        why = " ".join(text for text in (why, pass_text) if text)
    new_state = channels.promote(
        store,
        manifest,
        channel,
        by=user(),
        why=why,
        proven_only=proven_only,
        random_inputs=random_inputs,
        canaries=passes,
        decided_on=decided_on,
        counts=trust_answer.counts,
        accepted_losses=None if accept_loss else (),
    )
    _print_channel(store, new_state, as_json)


@command()
@click.argument("where", metavar="NAME[:CHANNEL]")
@why_option
def rollback(where: str, why: str, registry: str, as_json: bool) -> None:
    """Move a channel back to the version that it served before.

    If a rollout is running, only the rollout is aborted: the channel keeps its version.

    NAME:CHANNEL: a model and its channel; NAME alone: its channel stable.
    """
    model, channel = parse_channel(where, STABLE)
    store = open_store(registry)
    state = read_channel(store, model, channel)
    if state and state.active_rollout:
        from pipeline.rollout.operations import Operator, abort

        aborted_rollout = abort(store, model, channel, Operator(user(), store.now(), f"rollback: {why}".rstrip(": ")))
        say(f"the rollout of {aborted_rollout.version} is aborted; to leave {state.version} too, roll back again")
        _print_channel(store, state, as_json)
        return
    new_state = channels.rollback(store, model, channel, by=user(), why=why, decided_on=position_of(state))
    _print_channel(store, new_state, as_json)


def _show_differences(store: Store, older: Manifest, newer: Manifest, as_json: bool) -> None:
    from pipeline.compile.publication.pages import published_document
    from pipeline.site.comparison import compare, facts_of

    sections = compare(*(facts_of(published_document(store, manifest)) for manifest in (older, newer)))
    old_name, new_name = older.reference, newer.reference
    if as_json:
        emit_json({"before": old_name, "after": new_name, "sections": encode(sections)})
        return
    for section in sections:
        if section.changed:
            echo(f"{section.title}: {pluralize(len(section.changed) + section.more, 'change')}, {section.same} equal")
            print_table(
                ("value", old_name, new_name, "change"),
                [[row.name, row.before, row.after, row.change] for row in section.changed],
            )
    if not any(section.changed for section in sections):
        echo(f"{old_name} and {new_name} differ in nothing that is recorded")


def _show_quantization(store: Store, manifest: Manifest, as_json: bool) -> None:
    from validation.reporting.quantization import facts, row

    require_model(manifest)
    records = quantization_records(store, manifest)
    if as_json:
        emit_json(encode(records))
        return
    if not records:
        echo(f"{manifest.reference} has no graph that was quantized by calibration")
    for name, record in records.items():
        echo(f"{name}: " + "; ".join(f"{value} {fact_name}" for value, fact_name in facts(record)))
        if record.tensors:
            rows = list(map(row, record.tensors))
            print_table(list(rows[0]), [list(item.values()) for item in rows])
        for float_node in record.left:
            echo(f"left in float: {float_node}")
        echo()


def _show_layers(store: Store, manifest: Manifest, unit: str, as_json: bool) -> None:
    require_model(manifest)
    entry, layers_document = layers_of(store, manifest, unit)
    if as_json:
        emit_json(layers_document)
        return
    layers = read(layers_document, "Layers", list)
    echo(f"{entry.unit}: {pluralize(len(layers), 'layer')}")
    print_table(LAYER_COLUMNS, [layer_row(layer) for layer in layers])


def _show_stored(store: Store, manifest: Manifest, source: str) -> None:
    """Print a JSON document that the manifest names, verified."""
    digest = manifest.sources.get(source)
    if digest is None:
        raise UnknownNameError(
            f"{manifest.reference} has no {source}: it was not published by `enginesmith build`, which writes one"
        )
    emit_json(parse_json(store.read_blob(digest), 64 << 20))


def _print_latencies(reports_by_unit: Mapping[str, Sequence[LatencyReport]]) -> None:
    """Tables of each engine's latencies on each kind of machine, with the diagnosis of what bounds it."""
    from validation.latency.formatting import describe_diagnosis, format_bucket, list_remarks

    columns = ("bucket", "runtime", "p50", "p99", "items/s", "memory")
    reports = [report for unit_reports in reports_by_unit.values() for report in unit_reports]
    for machine in dict.fromkeys(report.machine for report in reports):
        echo(f"\nlatency on {machine}")
        for report in (report for report in reports if report.machine == machine):
            echo(report.unit)
            rows = [format_bucket(bucket) for bucket in report.buckets]
            print_table(columns, [[row[column] for column in columns] for row in rows])
            for line in (describe_diagnosis(report.anatomy), *list_remarks(report, columns)):
                echo(f"  {line}")


def _print_verified(result: Verification, repairs: Repairs) -> None:
    for problem in result.problems:
        effect_text = f" [{'; '.join(problem.affects)}]" if problem.affects else ""
        echo(f"{problem.kind}: {problem.what}: {problem.detail}{effect_text}")
    for digest in repairs.blobs:
        echo(f"moved away: {digest}; build again to restore it")
    for channel in repairs.channels:
        echo(f"rewritten: the snapshots of {channel}")
    faults = [problem for problem in result.problems if problem.fault]
    remaining_faults = [problem for problem in faults if problem.kind != "stale"]
    if len(remaining_faults) < len(faults) and not repairs.channels:
        say("to rewrite stale snapshots, run `enginesmith registry fsck --repair`")
    if remaining_faults:
        say(
            "to repair engines, build again; restore other files from a copy, or delete the folder of the version, "
            "models/NAME/versions/VERSION, and run `enginesmith registry gc`"
        )
    all_mended = bool(faults) and not remaining_faults and bool(repairs.channels)
    verdict = "valid" if result.sound else "repaired" if all_mended else "DAMAGED"
    size_text = format_bytes(result.size_bytes)
    echo(f"{verdict}: {pluralize(result.versions, 'version')}, {pluralize(result.blobs, 'blob')}, {size_text} read")


def _print_channel(store: Store, channel: Channel, as_json: bool) -> None:
    if as_json:
        history = encode(read_history(store, channel).moves)
        channel_facts = {"version": channel.version, "manifest": channel.manifest, "history": history}
        emit_json({"model": channel.model, "channel": channel.name, **channel_facts})
        return
    proven_text = " (serving only proven engines)" if channel.proven_only else ""
    echo(f"{channel.model}:{channel.name} -> {channel.version}{proven_text}")
