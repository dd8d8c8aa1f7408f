"""The commands of trust: sign, verify."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from enginesmith.cli.options import emit_json, json_option, reference_argument, registry_option, say, trust_option
from enginesmith.cli.tables import echo
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import load_policy, policy_of_key
from enginesmith.registry.trust.signing import Keyless, Signed, SigningKey, check_signer
from enginesmith.registry.versions.additions import add_signatures
from enginesmith.registry.versions.lookup import locate

SIGNING_KEY = "ENGINESMITH_SIGNING_KEY"


@click.command()
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
    help="Certificate between --certificate and the root; repeat it.",
)
@click.option(
    "--keyless", is_flag=True, help="Sign with an OpenID Connect identity through Sigstore; needs network access."
)
@registry_option
@json_option
def sign(
    reference: str,
    private_key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    keyless: bool,
    registry: str,
    as_json: bool,
) -> None:
    """Sign the version REF and the attestations that it has so far."""
    signer = _signer(private_key, certificate, chain, keyless)
    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    signed = add_signatures(store, manifest, signer)
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "signatures": [vars(item) for item in signed]})
        return
    echo(f"{manifest.model}@{manifest.version}  manifest {manifest.digest}")
    for line in signed_lines(signed):
        echo(line)


@click.command("verify")
@reference_argument
@click.option(
    "--public-key",
    type=click.Path(path_type=Path),
    show_default="the trust policy decides",
    help="Public key in PEM that must have signed the version.",
)
@trust_option
@registry_option
@json_option
def verify_signature(reference: str, public_key: Path | None, trust: Path | None, registry: str, as_json: bool) -> None:
    """Check that the version REF is signed as a key or a trust policy requires. Exit code 1 if it is not."""
    if public_key is None and trust is None:
        raise InputError("verify needs --public-key FILE, or a trust policy (--trust FILE)")
    policy = policy_of_key(public_key) if public_key is not None else load_policy(trust or "")
    store = open_store(registry)
    located = locate(store, parse_reference(reference))
    vouched = require(store, located.manifest, policy)
    manifest = located.manifest
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "signed_by": list(vouched.signers)})
    elif vouched.signers:
        echo(f"{manifest.model}@{manifest.version} is signed by {', '.join(vouched.signers)}")
    else:
        echo(f"{manifest.model}@{manifest.version}: the trust policy asks for no signature")


def sign_published(private_key: Path, registry: str, name: str, digest: str | None) -> None:
    """Sign what a build has just published, and nothing else: its manifest must have this digest.

    Raises IntegrityError when the registry holds another.
    """
    store = open_store(registry)
    manifest = locate(store, parse_reference(name)).manifest
    if manifest.digest != digest:
        raise IntegrityError(f"{name} was published as manifest {digest}, and is now {manifest.digest}; not signed")
    for line in signed_lines(add_signatures(store, manifest, _signer(private_key, None, (), keyless=False))):
        say(line)


def check_signing_key(private_key: Path) -> None:
    """Raise InputError for a key that cannot sign, before hours of work end with it."""
    check_signer(_signer(private_key, None, (), keyless=False))


def signed_lines(signed: Sequence[Signed]) -> list[str]:
    """One line per signature."""
    return [f"{'signed' if item.new else 'was signed'}: {item.what} by key {item.key_id[:12]}" for item in signed]


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
