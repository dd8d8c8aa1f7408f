"""Whether a version may be loaded by a trust policy; checked before pulling, running and promoting.

Only signatures by a policy's own keys are read, so that one who can write to the registry cannot hide a good signature
among many bad ones. Under a policy, an attestation without the signatures can only say that an engine failed; that it
is proven does not count then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from enginesmith.core.digest import check_digest, digest_of_bytes, is_digest
from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.names import version_order
from enginesmith.core.parsing import Malformed
from enginesmith.registry.evidence.attestations import Attestation
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Documents
from enginesmith.registry.store.layout import attestation_key, evidence_prefix, is_key, signature_key
from enginesmith.registry.trust.policy import Rule, TrustPolicy, configured_policy, load_policy
from enginesmith.registry.trust.signatures import (
    ATTESTATION_FILE,
    MANIFEST_FILE,
    KeySigner,
    SignatureBundle,
    Signer,
    objection,
    read_bundle,
)

# How many signatures are read to find those by certificates; those by keys are found by name.
MOST_SIGNATURES = 64
_SUFFIX = ".sig.json"


class UntrustedError(IntegrityError):
    """A version without the signatures that the trust policy of this client asks for."""


@dataclass(frozen=True)
class Vouched:
    """A version that may be loaded. signers: the policy's names of its signers; empty where none was needed.

    counts: whether an attestation counts.
    """

    signers: tuple[str, ...]
    counts: Callable[[Attestation], bool]


def require(store: Documents, manifest: Manifest, policy: TrustPolicy | Path | str | None = None) -> Vouched:
    """The signers of a version. Raises UntrustedError when the policy needs other or more signatures, or refuses it.

    manifest: the signatures of exactly this manifest are checked, so the caller must go on with it and load no other.
    policy: one, or its file; None is the one that ENGINESMITH_TRUST_POLICY names; without it nothing is required.
    Raises InputError for a policy that cannot be read, and for an unreadable key that it names.
    """
    if not isinstance(policy, TrustPolicy):
        policy = load_policy(policy) if policy else configured_policy()
    if policy is None:
        return Vouched((), lambda _: True)
    rule = policy.rule(manifest.model)
    if rule is None:
        raise UntrustedError(
            f"{_name(manifest)}: no rule of trust policy {policy.path} matches this model, so it is not loaded; "
            "add a rule for it there"
        )
    _check_version(manifest, rule, policy)
    if not rule.required:
        return Vouched((), lambda _: True)
    valid, refused = _find_signers(store, manifest, rule, MANIFEST_FILE, manifest.to_bytes())
    if len(valid) < rule.needed:
        raise UntrustedError(_too_few(store, manifest, rule, valid, refused, policy))

    def counts(attestation: Attestation) -> bool:
        key = attestation_key(manifest.model, manifest.version, attestation.engine, attestation.report)
        content = store.read(key)
        if attestation.verdict == "failed":
            return True
        if content is None or digest_of_bytes(content) != attestation.report:  # changed since it was read
            return False
        return len(_find_signers(store, manifest, rule, ATTESTATION_FILE, content)[0]) >= rule.needed

    return Vouched(tuple(signer.name for signer in valid), counts)


def signers_of(
    store: Documents, manifest: Manifest, signers: Sequence[Signer]
) -> tuple[tuple[Signer, ...], dict[str, str]]:
    """Those of `signers` with a valid signature of a version's manifest, and of the others signer -> reason."""
    rule = Rule("*", tuple(signers))
    valid, refused = _find_signers(store, manifest, rule, MANIFEST_FILE, manifest.to_bytes())
    return tuple(valid), refused


def signatures(
    store: Documents, manifest: Manifest, document: str
) -> Iterator[tuple[str, SignatureBundle | Malformed]]:
    """File name and signature, or the reason why it cannot be read, of each signature of a document (its digest)."""
    prefix = f"{evidence_prefix('signatures', manifest.model, manifest.version)}{check_digest(document)}/"
    for name in store.children(prefix):
        data = store.read(f"{prefix}{name}") if name.endswith(_SUFFIX) and is_key(name) else None
        try:
            bundle = read_bundle(data if data is not None else b"")
            if name != f"{bundle.key_id}{_SUFFIX}":
                raise Malformed(f"is by key {bundle.key_id[:12]}, and its name says another: it was moved by hand")
        except Malformed as error:
            yield name, error
        else:
            yield name, bundle


def find_misplaced(store: Documents, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Key and reason of each signature of a version that is malformed, or of another document than its folder says."""
    folder = evidence_prefix("signatures", manifest.model, manifest.version)
    for child in store.children(folder):
        document = child.removesuffix("/")
        if not is_digest(document):
            yield f"{folder}{child}", "not the digest of a document"
            continue
        for name, bundle in signatures(store, manifest, document):
            if isinstance(bundle, Malformed):
                yield f"{folder}{child}{name}", str(bundle)
            elif bundle.digest != document:
                yield (
                    f"{folder}{child}{name}",
                    f"is about another document ({bundle.digest[:12]}): it was moved by hand",
                )


def _find_signers(
    store: Documents, manifest: Manifest, rule: Rule, file: str, content: bytes
) -> tuple[list[Signer], dict[str, str]]:
    """The rule's signers with a valid signature of `content` (named `file`), and of the others signer -> reason."""
    document = digest_of_bytes(content)
    valid: list[Signer] = []
    refused: dict[str, str] = {}
    for signer in rule.signers:
        reasons = []
        for bundle in _candidates(store, manifest, document, signer):
            found = str(bundle) if isinstance(bundle, Malformed) else objection(bundle, signer, file, content)
            if found is None:
                valid.append(signer)
                break
            reasons.append(found)
        else:
            refused[str(signer)] = reasons[0] if reasons else "has not signed"
    return valid, refused


def _candidates(
    store: Documents, manifest: Manifest, document: str, signer: Signer
) -> Iterator[SignatureBundle | Malformed]:
    if not isinstance(signer, KeySigner):
        found = (bundle for _, bundle in islice(signatures(store, manifest, document), MOST_SIGNATURES))
        yield from (
            bundle for bundle in found if isinstance(bundle, SignatureBundle) and bundle.certificate is not None
        )
        return
    data = store.read(signature_key(manifest.model, manifest.version, document, signer.key_id))
    if data is None:
        return
    try:
        yield read_bundle(data)
    except Malformed as error:
        yield error


def _check_version(manifest: Manifest, rule: Rule, policy: TrustPolicy) -> None:
    if rule.min_version and version_order(manifest.version) < version_order(rule.min_version):
        raise UntrustedError(
            f"{_name(manifest)} is older than version {rule.min_version}, the oldest that trust policy {policy.path} "
            "allows; was the channel moved back? pull a newer version, or lower min_version there"
        )


def _too_few(
    store: Documents, manifest: Manifest, rule: Rule, valid: list[Signer], refused: dict[str, str], policy: TrustPolicy
) -> str:
    document = digest_of_bytes(manifest.to_bytes())
    try:
        ids = (name.removesuffix(_SUFFIX) for name, _ in islice(signatures(store, manifest, document), 8))
        names = [key_id[:12] for key_id in ids if is_digest(key_id)]
    except EnginesmithError:  # the refusal matters more than what else is wrong there
        names = []
    found = ", ".join(names) or "none"
    why = "; ".join(f"{signer}: {reason}" for signer, reason in refused.items())
    return (
        f"{_name(manifest)} has {len(valid)} of the {rule.needed} signatures that trust policy {policy.path} needs "
        f"for {rule.models!r}, so it is not loaded. Signatures found: {found}. Allowed: {why}. "
        f"Have it signed (`enginesmith registry sign {_name(manifest)} --key KEY`), or allow another key there"
    )


def _name(manifest: Manifest) -> str:
    return f"{manifest.model}@{manifest.version}"
