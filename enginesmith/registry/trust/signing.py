"""Signing the documents of a version with OpenSSF model-signing.

The signed document is the stored manifest. It names every blob by digest, so one signature covers all bytes of the
version; and it names its model and version, so a signature that is moved to another version is invalid there.
Attestations and attachments are written after the manifest, and are signed one by one in the same way.
"""

import json
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from enginesmith.core.errors import InputError, IntegrityError, digest_of_bytes
from enginesmith.registry.evidence.attachments import attachments
from enginesmith.registry.evidence.attestations import attestation_documents
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.layout import manifest_key, signature_key
from enginesmith.registry.trust.signatures import (
    ATTACHMENT_FILE,
    ATTESTATION_FILE,
    MANIFEST_FILE,
    KeySigner,
    SignatureBundle,
    ask_sigstore,
    import_model_signing,
    objection,
    read_bundle,
)

if TYPE_CHECKING:
    from model_signing import signing

PASSWORD = "ENGINESMITH_SIGNING_KEY_PASSWORD"  # noqa: S105 - the name of the variable
LARGEST_KEY_BYTES = 64 << 10


@dataclass(frozen=True)
class SigningKey:
    """A private key (PEM; NIST P-256, P-384 or P-521) on this machine, with its certificate (PEM) if it has one.

    chain: the certificates between that one and the root that verifiers trust.
    """

    private_key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Keyless:
    """Sigstore: an identity of OpenID Connect instead of a key. Needs the network; not run by this project's tests.

    identity_token: None uses the CI system's token, or else opens a browser.
    """

    identity_token: str | None = None


@dataclass(frozen=True)
class Signed:
    """A signature in the registry. what: 'manifest', 'attestation ...' or 'attachment ...'.  new: whether this call
    wrote it."""

    what: str
    key_id: str
    key: str
    new: bool

    def __str__(self) -> str:
        return f"{'signed' if self.new else 'already signed'}: {self.what} by key {self.key_id[:12]}"


def sign(
    store: Store, manifest: Manifest, signer: SigningKey | Keyless, attached: Collection[str] = ()
) -> tuple[Signed, ...]:
    """Sign a version's manifest and its present attestations; existing signatures of this key stay.

    attached: digests of files whose attachments are signed, too. Others are not signed: somebody else may have added
    code.
    A stored signature under the key's name that is invalid or has another certificate is replaced: another person with
    write access may have stored it.
    Raises InputError for a key that cannot sign, and a file that is not attached, UnavailableError if the extra
    `signing` is not installed, IntegrityError if the stored manifest is not the given one.
    """
    manifest_bytes = store.read(manifest_key(manifest.model, manifest.version))
    if manifest_bytes is None or manifest_bytes != manifest.to_bytes():
        raise IntegrityError(
            f"the stored manifest of {manifest.reference} is missing or has other bytes; "
            "run `enginesmith registry fsck`, and sign nothing until it finds no damage"
        )
    make_signature = _maker(signer)
    name = manifest.reference
    documents = [("manifest", MANIFEST_FILE, manifest_bytes)]
    for attestation, content in attestation_documents(store, manifest):
        documents.append((f"attestation {attestation.report[:12]} ({attestation.verdict})", ATTESTATION_FILE, content))
    attachment_documents = [
        (file, content) for file, content in attachments(store, manifest) if file.digest in attached
    ]
    documents += [
        (f"attachment {file.name} ({file.kind})", ATTACHMENT_FILE, content) for file, content in attachment_documents
    ]
    if missing_digests := [
        digest for digest in attached if digest not in {file.digest for file, _ in attachment_documents}
    ]:
        raise InputError(
            f"{name} has no attachment {missing_digests[0]}; attach the file first (`enginesmith registry attach`)"
        )
    public_key = _public_key(signer)
    return tuple(
        _put(store, manifest, title, (file, content), make_signature(name, file, content), public_key)
        for title, file, content in documents
    )


def check_signer(signer: SigningKey | Keyless) -> None:
    """Raise InputError for a key that cannot sign, UnavailableError without the extra; signs nothing."""
    _maker(signer)


def _put(
    store: Store, manifest: Manifest, what: str, document: tuple[str, bytes], signature: bytes, public_key: bytes | None
) -> Signed:
    """Write a signature of a document (file name, content) unless an equally good one is stored."""
    bundle = read_bundle(signature)
    if bundle.digest != digest_of_bytes(document[1]):
        raise IntegrityError(f"the signature of {what} is about {bundle.digest}; sign again")
    key = signature_key(manifest.model, manifest.version, bundle.digest, bundle.key_id)

    def make(before: bytes | None) -> bytes | None:
        return None if before is not None and _as_good(before, bundle, document, public_key) else signature

    return Signed(what, bundle.key_id, key, new=change(store, key, make) == signature)


def _as_good(before: bytes, fresh: SignatureBundle, document: tuple[str, bytes], public_key: bytes | None) -> bool:
    """Whether a stored signature is this key's, valid for the document, and has the certificates of the fresh one.

    Certificates are not part of the signed data, so only the key decides. A keyless signature (public_key: None) has a
    new key each time.
    """
    try:
        bundle = read_bundle(before)
    except IntegrityError:
        return False
    material_field = "verificationMaterial"
    stored_document = json.loads(before)
    if public_key is None or stored_document[material_field] != json.loads(fresh.data)[material_field]:
        return False
    # The bundle as if its key had signed without a certificate.
    bundle_bytes = json.dumps({**stored_document, material_field: {"publicKey": {"hint": fresh.key_id}}}).encode()
    bare_bundle = replace(bundle, key_id=fresh.key_id, certificate=None, data=bundle_bytes)
    return objection(bare_bundle, KeySigner("this key", public_key, fresh.key_id), *document) is None


def _public_key(signer: SigningKey | Keyless) -> bytes | None:
    """The public key (PEM) of a signing key; None for an identity."""
    if isinstance(signer, Keyless):
        return None
    from cryptography.hazmat.primitives import serialization

    password = None if signer.certificate else _password()  # as in model-signing
    public_key = serialization.load_pem_private_key(signer.private_key.read_bytes(), password).public_key()
    return public_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _maker(signer: SigningKey | Keyless) -> Callable[[str, str, bytes], bytes]:
    """A function from (name, file name, content) to the bytes of a signature."""
    signing_library, _, hashes = import_model_signing()
    config: signing.Config = signing_library.Config().set_hashing_config(hashes)
    if isinstance(signer, Keyless):
        token, attempt = signer.identity_token, partial(ask_sigstore, remedy="check the network, or sign with a key")
        attempt(lambda: config.use_sigstore_signer(identity_token=token, use_ambient_credentials=token is None))
    else:
        attempt = partial(_explain, str(signer.private_key))
        attempt(lambda: _with_key(config, signer))

    def make(name: str, file: str, content: bytes) -> bytes:
        with tempfile.TemporaryDirectory(prefix="enginesmith-sign-") as folder:
            document_path = Path(folder) / name
            document_path.mkdir()
            (document_path / file).write_bytes(content)
            signature_path = Path(folder) / "signature.json"
            attempt(lambda: config.sign(document_path, signature_path))
            return signature_path.read_bytes()

    return make


def _with_key(config: "signing.Config", signer: SigningKey) -> None:
    for path in (signer.private_key, signer.certificate, *signer.chain):
        if path is not None:
            try:
                size = path.stat().st_size if path.is_file() else -1
            except OSError as error:
                raise InputError(f"key {path}: {error.strerror}; give the path of a PEM file") from error
            if not 0 <= size <= LARGEST_KEY_BYTES:
                raise InputError(
                    f"key {path} is not a file of at most {LARGEST_KEY_BYTES} bytes; give the path of a PEM file"
                )
    if signer.certificate is not None:
        # model-signing accepts no empty chain; repeating the certificate does not change what verifiers trust.
        chain = signer.chain or (signer.certificate,)
        config.use_certificate_signer(
            private_key=signer.private_key, signing_certificate=signer.certificate, certificate_chain=chain
        )
        return
    password = cast("str | None", _password())  # cryptography requires bytes, against model-signing's annotation
    config.use_elliptic_key_signer(private_key=signer.private_key, password=password)


def _password() -> bytes | None:
    password = os.environ.get(PASSWORD)
    return password.encode() if password is not None else None


def _explain(what: str, work: Callable[[], object]) -> None:
    """Run `work`, and convert any error of model-signing and its libraries to InputError: `what` cannot sign."""
    try:
        work()
    except InputError:
        raise
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise InputError(
            f"signing with {what}: {text}; the key must be a private EC key in PEM (`openssl ecparam -name prime256v1 "
            f"-genkey -noout`), its password in {PASSWORD}; see docs/concepts/security.md"
        ) from error
