"""Trust policies: the signatures that a version needs, and whether it has them."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Len, Predicate, doc

from enginesmith.core.codec import decode
from enginesmith.core.errors import (
    EnginesmithError,
    InputError,
    UntrustedError,
    check_digest,
    digest_of_bytes,
    is_digest,
)
from enginesmith.core.names import TRUST_VARIABLE, Name, version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Count, Format, JsonObject
from enginesmith.registry.evidence.attestations import Attestation
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Documents
from enginesmith.registry.store.layout import attestation_key, evidence_prefix, is_key, signature_key
from enginesmith.registry.trust.signatures import (
    ATTACHMENT_FILE,
    ATTESTATION_FILE,
    MANIFEST_FILE,
    CertificateSigner,
    KeylessSigner,
    KeySigner,
    SignatureBundle,
    Signer,
    key_id_of_pem,
    objection,
    read_bundle,
)

if TYPE_CHECKING:
    import yaml

# The trust policy of a client: a YAML file with the signers that a model needs before it is loaded
# (docs/concepts/security.md).
#
# A model that no rule matches is refused; a rule for `*` matches all. An unknown key is an error, since a policy with a
# misspelt key would protect less than it seems to.

FORMAT = 1
LARGEST_POLICY_BYTES = 256 << 10
LARGEST_KEY_BYTES = 64 << 10
MOST_SIGNERS = 100
MOST_RULES = 1000

_GLOB = re.compile(r"[a-z0-9._*?\[\]!-]{1,128}")
_EVENTS = 100_000
_DEPTH = 16

_Text = Annotated[str, Len(1, 1000), Predicate(str.isprintable), doc("1 to 1000 printable characters")]


@dataclass(frozen=True)
class _KeyText:
    public_key: _Text


@dataclass(frozen=True)
class _CertificateText:
    """A signer by certificate. certificate_roots: without any, model-signing would trust all roots of browsers."""

    certificate_roots: Annotated[
        tuple[_Text, ...], Len(1, MOST_SIGNERS), doc(f"a list; name 1 to {MOST_SIGNERS} files")
    ]
    identity: _Text


@dataclass(frozen=True)
class _KeylessText:
    keyless_identity: _Text
    keyless_issuer: _Text


@dataclass(frozen=True)
class _RuleText:
    """A rule as written in the file. signers: their names."""

    models: Annotated[str, Predicate(_GLOB.fullmatch), doc("a glob over names, as in 'digits*'")]
    signers: tuple[_Text, ...] = ()
    required: bool = True
    needed: Count = 1
    min_version: Name | Count | None = None


@dataclass(frozen=True)
class _PolicyText:
    """The policy file. signers: each of one of three kinds."""

    signers: Annotated[Mapping[_Text, JsonObject], Len(0, MOST_SIGNERS)]
    rules: Annotated[tuple[_RuleText, ...], Len(1, MOST_RULES)]
    format: Annotated[int, Format(FORMAT)] = FORMAT


@dataclass(frozen=True)
class Rule:
    """The requirements on models that match the glob `models`. needed: how many of the signers must have signed.

    min_version: versions that sort before it are refused, with any signatures.
    """

    models: str
    signers: tuple[Signer, ...] = ()
    required: bool = True
    needed: int = 1
    min_version: str | None = None


@dataclass(frozen=True)
class TrustPolicy:
    """The rules in their order, and the file that contains them."""

    rules: tuple[Rule, ...]
    path: str = ""

    def rule(self, model: str) -> Rule | None:
        """The first rule that matches a model's name; None means that the model is refused."""
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(model, rule.models)), None)


def load_policy(path: Path | str) -> TrustPolicy:
    """Read a policy and the keys it names. Raises InputError with the file, the key and the remedy."""
    path = Path(path)
    try:
        document = _plain(_read_file(path, LARGEST_POLICY_BYTES))
        policy_text = decode(document, _PolicyText, "policy")
        signers = {name: _signer(name, value, path.parent) for name, value in policy_text.signers.items()}
        signer_names: dict[object, str] = {}
        for name, signer in signers.items():  # one key with two names would count as two signers
            signer_id = signer.key_id if isinstance(signer, KeySigner) else signer.identity
            if signer_id in signer_names:
                subject = "key" if isinstance(signer, KeySigner) else "identity"
                raise Malformed(f"signers {signer_names[signer_id]!r} and {name!r} have the same {subject}; keep one")
            signer_names[signer_id] = name
        return TrustPolicy(
            tuple(_rule(rule, f"rules[{index}]", signers) for index, rule in enumerate(policy_text.rules)), str(path)
        )
    except Malformed as error:
        raise InputError(f"trust policy {path}: {error}; see docs/concepts/security.md") from error


def policy_of_key(path: Path) -> TrustPolicy:
    """A policy that requires the signature of one public key, for all models. Raises InputError."""
    return TrustPolicy((Rule("*", (public_key(path),)),), f"(--public-key {path})")


def public_key(path: Path) -> KeySigner:
    """The signer whose public key is in a file. Raises InputError."""
    pem = _read_file(path, LARGEST_KEY_BYTES)
    try:
        return KeySigner(path.name, pem, key_id_of_pem(pem))
    except Malformed as error:
        raise InputError(f"{path} {error}; `openssl ec -in KEY -pubout` writes one") from error


def _plain(data: bytes) -> object:
    """The document in YAML bytes. Raises Malformed for values that JSON lacks, duplicate keys and deep nesting."""
    import yaml

    try:
        text = data.decode()
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or count > _EVENTS or depth > _DEPTH:
                raise Malformed("has aliases, deep nesting or too many values; see docs/concepts/security.md")
        _refuse_duplicates(yaml.compose(text, Loader=yaml.SafeLoader))
        document: object = yaml.safe_load(text)
        return document
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"is not plain YAML ({(str(error).splitlines() or ['?'])[0][:200]})") from error


def _refuse_duplicates(root: "yaml.Node | None") -> None:
    import yaml

    pending_nodes = [root]
    while pending_nodes:
        node = pending_nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            pending_nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            key_names = [str(key.value) for key, _ in node.value]
            if len(set(key_names)) < len(key_names):
                raise Malformed(f"gives a key twice near line {node.start_mark.line + 1}; keep one")
            pending_nodes += [value for _, value in node.value]


def _rule(text: _RuleText, where: str, signers: Mapping[str, Signer]) -> Rule:
    signer_names = text.signers
    if unknown_names := [name for name in signer_names if name not in signers]:
        raise Malformed(
            f"{where}.signers names {unknown_names[0][:80]!r}; known: {', '.join(sorted(signers)) or 'none'}"
        )
    if len(set(signer_names)) < len(signer_names) or (text.required and not 1 <= text.needed <= len(signer_names)):
        raise Malformed(
            f"{where} needs {text.needed} of {len(signer_names)} signers; name each signer once, and set `needed` to 1 "
            "up to their number"
        )
    version = None if text.min_version is None else str(text.min_version)
    return Rule(text.models, tuple(signers[name] for name in signer_names), text.required, text.needed, version)


def _signer(name: str, value: JsonObject, folder: Path) -> Signer:
    field_path = f"signers.{name[:80]}"
    if "public_key" in value:
        pem = _read_file(folder / decode(value, _KeyText, field_path).public_key, LARGEST_KEY_BYTES)
        try:
            return KeySigner(name, pem, key_id_of_pem(pem))
        except Malformed as error:
            raise Malformed(f"{field_path}.public_key {error}") from error
    if "certificate_roots" in value:
        certificate_text = decode(value, _CertificateText, field_path)
        roots = (_read_file(folder / root, LARGEST_KEY_BYTES) for root in certificate_text.certificate_roots)
        return CertificateSigner(name, tuple(roots), certificate_text.identity)
    keyless_text = decode(value, _KeylessText, field_path)
    return KeylessSigner(name, keyless_text.keyless_identity, keyless_text.keyless_issuer)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"trust: {path}: {reason}; without it nothing is trusted, so nothing is loaded") from error
    if len(content) > limit:
        raise InputError(f"trust: {path} is over {limit} bytes; this is neither a policy nor a key")
    return content


# Whether a trust policy allows loading a version; checked before pulling, running and promoting.
#
# Only signatures by a policy's own keys are read, so that a person with write access to the registry cannot hide a good
# signature among many bad ones. Under a policy, an attestation without the signatures counts only if it says that an
# engine failed, not if it says that it is proven.

# The number of signatures that are read to find those by certificates; those by keys are found by name.
MOST_SIGNATURES = 64
_SUFFIX = ".sig.json"


@dataclass(frozen=True)
class Vouched:
    """A version that may be loaded. signers: the policy's names of its signers; empty if none were required.
    counts: whether an attestation counts.  attachment_signers: the signers of an attachment's document, if there are as
    many as the policy requires; empty otherwise, and if none are required."""

    signers: tuple[str, ...]
    counts: Callable[[Attestation], bool] = lambda _: True
    attachment_signers: Callable[[bytes], tuple[str, ...]] = lambda _: ()


def require(store: Documents, manifest: Manifest, policy: TrustPolicy | Path | str | None = None) -> Vouched:
    """The signers of a version. Raises UntrustedError if the policy requires other or more signatures, or refuses it.

    manifest: the signatures of exactly this manifest are checked, so the caller must continue with it and load no
    other.  policy: one, or its file; None is the one in ENGINESMITH_TRUST_POLICY; without that nothing is required.
    Raises InputError for an unreadable policy, or an unreadable key that it names.
    """
    if not isinstance(policy, TrustPolicy):
        path = policy or os.environ.get(TRUST_VARIABLE)
        if not path:
            return Vouched(())
        policy = load_policy(path)
    rule = policy.rule(manifest.model)
    if rule is None:
        raise UntrustedError(
            f"{manifest.reference}: no rule of trust policy {policy.path} matches this model, so it is not loaded; "
            "add a rule for it there"
        )
    _check_version(manifest, rule, policy)
    if not rule.required:
        return Vouched(())
    valid_signers, refusals = find_signers(store, manifest, rule.signers, MANIFEST_FILE, manifest.to_bytes())
    if len(valid_signers) < rule.needed:
        raise UntrustedError(_too_few(store, manifest, rule, valid_signers, refusals, policy))

    def counts(attestation: Attestation) -> bool:
        key = attestation_key(manifest.model, manifest.version, attestation.engine, attestation.report)
        content = store.read(key)
        if attestation.verdict == "failed":
            return True
        if content is None or digest_of_bytes(content) != attestation.report:  # changed since it was read
            return False
        return len(find_signers(store, manifest, rule.signers, ATTESTATION_FILE, content)[0]) >= rule.needed

    def attachment_signers(document: bytes) -> tuple[str, ...]:
        signers = find_signers(store, manifest, rule.signers, ATTACHMENT_FILE, document)[0]
        return tuple(signer.name for signer in signers) if len(signers) >= rule.needed else ()

    return Vouched(tuple(signer.name for signer in valid_signers), counts, attachment_signers)


def signatures(
    store: Documents, manifest: Manifest, document: str
) -> Iterator[tuple[str, SignatureBundle | Malformed]]:
    """File name and signature, or the reason why it is unreadable, of each signature of a document (its digest)."""
    prefix = f"{evidence_prefix('signatures', manifest.model, manifest.version)}{check_digest(document)}/"
    for name in store.children(prefix):
        bundle_bytes = store.read(f"{prefix}{name}") if name.endswith(_SUFFIX) and is_key(name) else None
        try:
            bundle = read_bundle(bundle_bytes if bundle_bytes is not None else b"")
            if name != f"{bundle.key_id}{_SUFFIX}":
                raise Malformed(
                    f"is by key {bundle.key_id[:12]}, but its file name has another key: it was moved by hand"
                )
        except Malformed as error:
            yield name, error
        else:
            yield name, bundle


def find_misplaced(store: Documents, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Key and reason of each signature of a version that is malformed, or of another document than its folder names."""
    folder = evidence_prefix("signatures", manifest.model, manifest.version)
    for child in store.children(folder):
        document_digest = child.removesuffix("/")
        if not is_digest(document_digest):
            yield f"{folder}{child}", "not the digest of a document"
            continue
        for name, bundle in signatures(store, manifest, document_digest):
            if isinstance(bundle, Malformed):
                yield f"{folder}{child}{name}", str(bundle)
            elif bundle.digest != document_digest:
                yield (
                    f"{folder}{child}{name}",
                    f"is about another document ({bundle.digest[:12]}): it was moved by hand",
                )


def find_signers(
    store: Documents, manifest: Manifest, signers: Sequence[Signer], file: str, content: bytes
) -> tuple[list[Signer], dict[str, str]]:
    """The signers with a valid signature of `content` (named `file`), and for the others signer -> reason."""
    document_digest = digest_of_bytes(content)
    valid_signers: list[Signer] = []
    refusals: dict[str, str] = {}
    for signer in signers:
        reasons = []
        for bundle in _candidates(store, manifest, document_digest, signer):
            refusal_reason = str(bundle) if isinstance(bundle, Malformed) else objection(bundle, signer, file, content)
            if refusal_reason is None:
                valid_signers.append(signer)
                break
            reasons.append(refusal_reason)
        else:
            refusals[str(signer)] = reasons[0] if reasons else "has not signed"
    return valid_signers, refusals


def _candidates(
    store: Documents, manifest: Manifest, document: str, signer: Signer
) -> Iterator[SignatureBundle | Malformed]:
    if not isinstance(signer, KeySigner):
        bundles = (bundle for _, bundle in islice(signatures(store, manifest, document), MOST_SIGNATURES))
        yield from (
            bundle for bundle in bundles if isinstance(bundle, SignatureBundle) and bundle.certificate is not None
        )
        return
    bundle_bytes = store.read(signature_key(manifest.model, manifest.version, document, signer.key_id))
    if bundle_bytes is None:
        return
    try:
        yield read_bundle(bundle_bytes)
    except Malformed as error:
        yield error


def _check_version(manifest: Manifest, rule: Rule, policy: TrustPolicy) -> None:
    if rule.min_version and version_order(manifest.version) < version_order(rule.min_version):
        raise UntrustedError(
            f"{manifest.reference} is older than version {rule.min_version}, the oldest that trust policy "
            f"{policy.path} allows; was the channel moved back? pull a newer version, or lower min_version there"
        )


def _too_few(
    store: Documents, manifest: Manifest, rule: Rule, valid: list[Signer], refusals: dict[str, str], policy: TrustPolicy
) -> str:
    document_digest = digest_of_bytes(manifest.to_bytes())
    try:
        key_ids = (name.removesuffix(_SUFFIX) for name, _ in islice(signatures(store, manifest, document_digest), 8))
        key_names = [key_id[:12] for key_id in key_ids if is_digest(key_id)]
    except EnginesmithError:  # the refusal is more important than other errors here
        key_names = []
    signer_list = ", ".join(key_names) or "none"
    refusal_text = "; ".join(f"{signer}: {reason}" for signer, reason in refusals.items())
    return (
        f"{manifest.reference} has {len(valid)} of the {rule.needed} signatures that trust policy {policy.path} needs "
        f"for {rule.models!r}, so it is not loaded. Signatures found: {signer_list}. Allowed: {refusal_text}. "
        f"Have it signed (`enginesmith registry sign {manifest.reference} --key KEY`), or allow another key there"
    )
