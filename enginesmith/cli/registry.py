"""Commands about versions on serving nodes: list, mirror, export, gc, pin, attach, sign, verify; and KServe's storage
initializer."""

import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import click

from enginesmith.cli import pull
from enginesmith.cli.options import (
    COUNT,
    FILE,
    PRESENT_FILE,
    TARGET,
    command,
    duration,
    emit_json,
    number_option,
    path_option,
    reference_argument,
    references_argument,
    say,
    why_option,
)
from enginesmith.cli.tables import cell, echo, print_fields, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, UnknownNameError, digest_of_file
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.core.parsing import Malformed, user
from enginesmith.core.requirements import Requirement, for_target
from enginesmith.core.text import format_bytes, now, pluralize
from enginesmith.exchange.kserve import pull_arguments
from enginesmith.exchange.mirror import mirror as copy
from enginesmith.exchange.oci import export_oci as write
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.evidence.attachments import COMPILE_CACHE, Attachment
from enginesmith.registry.gc import GRACE, Collected, collect
from enginesmith.registry.registered_specs import pin as pin_version
from enginesmith.registry.registered_specs import unpin as unpin_version
from enginesmith.registry.store.base import open_store
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import load_policy, policy_of_key
from enginesmith.registry.trust.signing import Keyless, SigningKey
from enginesmith.registry.versions import index
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.publish import add_attachment, add_signatures


@command()
@references_argument
@click.argument("dest", metavar="DEST")
@click.option(
    "--channels", "with_channels", is_flag=True, help="If REF is NAME:CHANNEL, also move this channel in DEST."
)
def mirror(
    references: tuple[str, ...], dest: str, with_channels: bool, trust: Path | None, registry: str, as_json: bool
) -> None:
    """Copy the version of each REF to the registry DEST (a path or URI, as for --registry), and verify the copy."""
    source_references = [parse_reference(text) for text in references]
    source_store, dest_store = open_store(registry), open_store(dest, create=True)
    copy_report = copy(source_store, source_references, dest_store, with_channels=with_channels, trust=trust, by=user())
    if as_json:
        emit_json({"dest": dest_store.uri, **asdict(copy_report)})
        return
    for name in copy_report.versions:
        echo(name)
    for name in copy_report.moved:
        echo(f"channel {name}")
    echo(
        f"{pluralize(copy_report.copied, 'blob')} copied ({format_bytes(copy_report.size_bytes)}), "
        f"{copy_report.present} already there"
    )


@command("export")
@reference_argument
@click.argument("dest", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--proven-only", is_flag=True, help="Leave out engines that are not proven.")
@click.option(
    "--layout",
    type=click.Choice(["plain", "triton"]),
    default="plain",
    show_default=True,
    help="Content of an image; triton: a Triton model repository in /models, as in a model car of KServe.",
)
def export_oci(
    reference: str, dest: Path, proven_only: bool, layout: str, trust: Path | None, registry: str, as_json: bool
) -> None:
    """Write the engines of REF to the folder DEST as an OCI image layout: an image for each engine, and an index."""
    store = open_store(registry)
    located_version = locate(store, parse_reference(reference))
    tags = write(store, located_version, dest, proven_only=proven_only, triton=layout == "triton", trust=trust)
    if as_json:
        emit_json({"path": str(dest), "tags": list(tags)})
        return
    for tag in tags:
        echo(f"oci:{dest}:{tag}")
    say(f"push one with: skopeo copy --all --preserve-digests oci:{dest}:{tags[0]} docker://HOST/NAME:TAG")


@command()
@click.argument("pairs", metavar="SRC DEST ...", nargs=-1, required=True)
def initialize(pairs: tuple[str, ...], registry: str) -> None:
    """Pull each enginesmith:// URI SRC into the folder DEST; KServe runs this command as a storage initializer.

    SRC: enginesmith://REF?OPTION=VALUE&..., with options of `enginesmith pull`, such as
    enginesmith://digits@3?target=l4. The default layout is triton.
    """
    if len(pairs) % 2:
        raise click.UsageError(f"{pairs[-1]!r} has no folder: give SRC and DEST in pairs")
    argument_lists = [pull_arguments(uri) for uri in pairs[::2]]
    for uri, arguments, dest in zip(pairs[::2], argument_lists, pairs[1::2], strict=True):
        registry_option = [] if "--registry" in arguments else ["--registry", registry]
        try:
            pull.pull.main([*arguments, *registry_option, "--dest", dest, "--quiet"], standalone_mode=False)
        except click.UsageError as error:
            raise InputError(f"{uri!r}: {error.format_message()}") from error


@command("list")
@click.argument("model", required=False)
@number_option("--limit", COUNT, 100, "Maximum number of models or versions.")
@click.option("--before", metavar="VERSION", help="Only versions older than this one.")
@click.option("--after", metavar="NAME", help="Only models after this name, or versions newer than this one.")
def list_models(
    model: str | None, limit: int, before: str | None, after: str | None, registry: str, as_json: bool
) -> None:
    """List the models of a registry, or the newest versions of MODEL.

    To read a long list in pages, use --limit with --after or --before.
    """
    if model is None:
        if before is not None:
            raise click.UsageError("--before lists versions of one model; name a MODEL")
        _list_models(registry, as_json, limit, after)
    else:
        _list_versions(registry, model, as_json, limit, before, after)


def _list_models(registry: str, as_json: bool, limit: int, after: str | None) -> None:
    rows = index.list_models(open_store(registry), limit=limit + 1, after=after)
    has_more, rows = len(rows) > limit, rows[:limit]
    if has_more:
        say(f"at most {limit} models are shown; for more add --after {rows[-1].model}")
    if as_json:
        emit_json([vars(row) for row in rows])
        return
    print_table(
        ("model", "versions", "newest", "channels"),
        [[row.model, str(len(row.versions)), row.versions[-1], cell(row.channels)] for row in rows],
    )


def _list_versions(registry: str, model: str, as_json: bool, limit: int, before: str | None, after: str | None) -> None:
    rows = index.list_versions(open_store(registry), model, limit=limit + 1, before=before, after=after)
    # One more than is shown is requested, to know whether there are more: the newest with `after`, else the oldest.
    has_more, rows = len(rows) > limit, rows[:limit] if after is not None else rows[-limit:]
    if has_more:
        ends = f"older ones add --before {rows[0].version}", f"newer ones add --after {rows[-1].version}"
        say(f"at most {limit} versions are shown; for {ends[after is not None]}")
    if as_json:
        emit_json([row.to_json() for row in rows])
        return
    for row in rows:
        if row.damage:
            say(f"{model}@{row.version} cannot be read: {row.damage}")
    print_fields(("version", "created_at", "engines", "channels"), rows)


@command()
@click.option("--delete", is_flag=True, help="Mark and delete; without this option nothing changes.")
@click.option(
    "--grace", type=duration, default=f"{GRACE.days}d", show_default=True, help="Time from marking to deleting."
)
@number_option("--keep-versions", COUNT, 10, "Number of newest versions to keep for each model.")
@number_option(
    "--keep-moves", COUNT, 5, "Number of newest moves to keep for each channel, so that it can be rolled back."
)
def gc(delete: bool, grace: timedelta, keep_versions: int, keep_moves: int, registry: str, as_json: bool) -> None:
    """List garbage: files that nothing needs. With --delete, mark it, and delete garbage marked for at least --grace.

    If your object store can list new files with a delay, --grace must be over a day.
    """
    rules = Rules(keep_versions, keep_moves)
    gc_report = collect(open_store(registry), rules, grace, delete=delete, say=lambda name: say(f"deleting {name}"))
    if not as_json:
        _print(gc_report)
        return
    items = [{**asdict(item), "due": item.due.isoformat() if item.due else None} for item in gc_report.items]
    emit_json(
        {
            "acted": gc_report.acted,
            "items": items,
            "kept": {name: list(reasons) for name, reasons in gc_report.kept.items()},
            "leases": list(gc_report.leases),
            "deleted_bytes": gc_report.size_bytes("deleted"),
            "waiting_bytes": gc_report.size_bytes("new", "waiting", "due", "held"),
        }
    )


@command()
@reference_argument
@click.option("--remove", is_flag=True, help="Remove the pin of REF (NAME@VERSION), even if its files are gone.")
@why_option
def pin(reference: str, remove: bool, why: str, registry: str, as_json: bool) -> None:
    """Protect the version REF from garbage collection until the pin is removed."""
    if remove:
        if why:
            raise click.UsageError("--why is stored with a pin; leave it out with --remove")
        version_reference = parse_reference(reference)
        if version_reference.version is None:
            raise UnknownNameError(f"{reference!r} names no version; give {version_reference.model}@VERSION")
        unpin_version(open_store(registry), version_reference.model, version_reference.version)
        if as_json:
            emit_json({"model": version_reference.model, "version": version_reference.version, "pinned": False})
        else:
            echo(f"{version_reference} is unpinned")
        return
    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    is_new = pin_version(store, manifest, by=user(), why=why)
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "pinned": True, "changed": is_new})
    else:
        echo(f"{manifest.reference} is pinned" + ("" if is_new else " already"))


def _print(report: Collected) -> None:
    rows = []
    for item in report.items:
        date = item.due.isoformat(timespec="minutes") if item.due else ""
        rows.append(
            [item.kind, item.name, format_bytes(item.size_bytes) if item.size_bytes else "", item.state, date, item.why]
        )
    if rows:
        print_table(("kind", "name", "size", "state", "due", "why"), rows)
    for lease in report.leases:
        echo(f"running, or left by a killed process: {lease}")
    freed_bytes, garbage_bytes = report.size_bytes("deleted"), report.size_bytes("new", "waiting", "due", "held")
    count_text = pluralize(len(report.kept), "version")
    echo(
        f"{count_text} kept; {format_bytes(freed_bytes)} deleted, {format_bytes(garbage_bytes)} of garbage not deleted"
    )
    if rows and not report.acted:
        say("nothing was changed; --delete marks new garbage, and deletes garbage that is due")


@command()
@reference_argument
@click.argument("file", type=FILE)
@click.option("--kind", required=True, help="Kind of the file: torch-compile-cache, or your own name.")
@click.option("--target", metavar="TARGET", show_default="any machine", help=f"{TARGET}; only such machines pull it.")
@click.option("--note", default="", help="Remark for people, at most 1000 characters.")
@click.option(
    "--measure",
    metavar="MODULE:FUNCTION",
    help="For a torch-compile-cache: time the start of this model with and without it; writes FILE if it is missing.",
)
def attach(
    reference: str,
    file: Path,
    kind: str,
    target: str | None,
    note: str,
    measure: str | None,
    registry: str,
    as_json: bool,
) -> None:
    """Add FILE to the published version REF; `enginesmith pull` downloads it with the engine, if it fits the machine.

    A torch-compile-cache records which machines it fits. Nodes pull it only if it is signed: run `enginesmith registry
    sign REF --attachment FILE` afterwards.
    """
    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    if measure and kind != COMPILE_CACHE:
        raise click.UsageError(f"--measure works only with --kind {COMPILE_CACHE}")
    start_times: dict[str, float] = {}
    if measure:
        from enginesmith.compile_caches.loading import measure_start

        start_times = measure_start(measure, file).to_json()
    if not file.is_file():
        remedy = "; --measure MODULE:FUNCTION creates it" if kind == COMPILE_CACHE else ""
        raise InputError(f"{file} is not a file{remedy}")
    attachment = Attachment(
        name=file.name,
        kind=kind,
        model=manifest.model,
        version=manifest.version,
        manifest=manifest.digest,
        digest=digest_of_file(file),
        size_bytes=file.stat().st_size,
        by=user(),
        created_at=now(),
        requires=_requirements(file, kind, target),
        note=note,
        measured=start_times,
    )
    try:
        entry, is_new = add_attachment(store, manifest, attachment, file)
    except Malformed as error:
        raise InputError(f"{file} cannot be attached: {error}") from error
    if as_json:
        emit_json({**encode(entry), "new": is_new})
        return
    measured_text = ", ".join(f"{name} {value:g}" for name, value in entry.measured.items())
    echo(f"{'attached' if is_new else 'already attached'}: {entry.name} to {manifest.reference}")
    echo(f"{entry.kind} {entry.digest}" + (f"  {measured_text}" if measured_text else ""))


def _requirements(file: Path, kind: str, target: str | None) -> tuple[Requirement, ...]:
    """Requirements of an attachment on a machine: those of a compile cache, and the target."""
    requirements: tuple[Requirement, ...] = ()
    if kind == COMPILE_CACHE:
        from enginesmith.compile_caches.loading import read_requirements

        requirements = read_requirements(file)
    if target is None:
        return requirements
    parsed_target = target_named(target)
    hardware = for_target(
        parsed_target, only=parsed_target.name if parsed_target.is_cpu and parsed_target.name != "cpu" else ""
    )
    return requirements if hardware in requirements else (*requirements, hardware)


SIGNING_KEY = "ENGINESMITH_SIGNING_KEY"


@command()
@reference_argument
@click.option(
    "--key",
    "private_key",
    type=click.Path(path_type=Path),
    envvar=SIGNING_KEY,
    show_envvar=True,
    help="Private EC key in PEM; its password, if any, is read from ENGINESMITH_SIGNING_KEY_PASSWORD.",
)
@click.option("--certificate", type=click.Path(path_type=Path), help="Certificate of the key, in PEM.")
@click.option(
    "--chain",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Intermediate certificate between --certificate and the root, in PEM; repeatable.",
)
@click.option(
    "--keyless", is_flag=True, help="Sign with an OpenID Connect identity through Sigstore; needs network access."
)
@click.option(
    "--attachment",
    "files",
    metavar="FILE",
    multiple=True,
    type=PRESENT_FILE,
    help="Also sign the attachment with the content of this file; repeatable.",
)
def sign(
    reference: str,
    private_key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    keyless: bool,
    files: tuple[Path, ...],
    registry: str,
    as_json: bool,
) -> None:
    """Sign the version REF and its current attestations."""
    signer = _signer(private_key, certificate, chain, keyless)
    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    signatures = add_signatures(store, manifest, signer, [digest_of_file(file) for file in files])
    if as_json:
        rows = [vars(signature) for signature in signatures]
        emit_json({"model": manifest.model, "version": manifest.version, "signatures": rows})
        return
    echo(f"{manifest.reference}  manifest {manifest.digest}")
    for signature in signatures:
        echo(str(signature))


@command("verify")
@reference_argument
@path_option("--public-key", "Public key in PEM that must have signed the version.", "the trust policy decides")
def verify_signature(reference: str, public_key: Path | None, trust: Path | None, registry: str, as_json: bool) -> None:
    """Check that the version REF has the signatures that --public-key or --trust requires. Exit code 1 if not."""
    if public_key is None and trust is None:
        raise InputError("verify needs --public-key FILE, or a trust policy (--trust FILE)")
    policy = policy_of_key(public_key) if public_key is not None else load_policy(trust or "")
    store = open_store(registry)
    located_version = locate(store, parse_reference(reference))
    trust_result = require(store, located_version.manifest, policy)
    manifest = located_version.manifest
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "signed_by": list(trust_result.signers)})
    elif trust_result.signers:
        echo(f"{manifest.reference} is signed by {', '.join(trust_result.signers)}")
    else:
        echo(f"{manifest.reference}: the trust policy asks for no signature")


def _signer(
    private_key: Path | None, certificate: Path | None, chain: tuple[Path, ...], keyless: bool
) -> SigningKey | Keyless:
    if keyless:
        return Keyless(identity_token=os.environ.get("ENGINESMITH_IDENTITY_TOKEN"))
    if private_key is None:
        raise InputError(f"sign needs --key FILE (or {SIGNING_KEY}), or --keyless")
    if chain and certificate is None:
        raise InputError("--chain needs --certificate: the chain leads from it to the root")
    return SigningKey(private_key, certificate, chain)
