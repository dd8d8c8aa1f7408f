"""Signatures of documents: parsing, and checking whether a signer of a policy made one.

A stored signature is a Sigstore bundle around an in-toto statement, as OpenSSF model-signing writes it. `read_bundle`
parses it strictly and without cryptography: the document and the key that it names are claims until `objection` has
verified them with model-signing, an optional dependency that takes seconds to import.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Len, Predicate, doc

from enginesmith.core.codec import Excerpt, parse_as
from enginesmith.core.errors import Digest, InputError, UnavailableError, digest_of_bytes
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Json, JsonObject

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
    from model_signing import verifying

MAX_BYTES = 256 << 10
# The file name under which a document of each kind is signed, so that a signature is valid for one kind only.
MANIFEST_FILE = "manifest.json"
ATTESTATION_FILE = "attestation.json"
ATTACHMENT_FILE = "attachment.json"


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


_Base64 = Annotated[str, Predicate(_is_base64), doc("base64")]


@dataclass(frozen=True)
class _Key(Excerpt):
    hint: Digest


@dataclass(frozen=True)
class _Certificate(Excerpt):
    rawBytes: _Base64  # noqa: N815 - the format's name


@dataclass(frozen=True)
class _Chain(Excerpt):
    certificates: Annotated[tuple[_Certificate, ...], Len(1, 16)]


@dataclass(frozen=True)
class _Material:
    """One of the first three fields is set. Other fields are refused: a library might accept another spelling."""

    publicKey: _Key | None = None  # noqa: N815
    certificate: _Certificate | None = None
    x509CertificateChain: _Chain | None = None  # noqa: N815
    tlogEntries: Json = None  # noqa: N815
    timestampVerificationData: Json = None  # noqa: N815

    def check_fields(self) -> None:
        """Raise Malformed unless exactly one of the three is set."""
        if (count := sum(map(bool, (self.publicKey, self.certificate, self.x509CertificateChain)))) != 1:
            raise Malformed(f"it has {count} of publicKey, certificate, x509CertificateChain; it must have one")

    @property
    def first_certificate(self) -> str | None:
        """The certificate of the key in base64; None if there is only a key."""
        chain = self.x509CertificateChain
        certificate = chain.certificates[0] if chain else self.certificate
        return certificate.rawBytes if certificate else None


@dataclass(frozen=True)
class _Envelope:
    payload: _Base64
    payloadType: Literal["application/vnd.in-toto+json"]  # noqa: N815
    signatures: Annotated[tuple[JsonObject, ...], Len(1, 1), doc("a list of exactly one signature")]


@dataclass(frozen=True)
class _Bundle:
    verificationMaterial: _Material  # noqa: N815
    dsseEnvelope: _Envelope  # noqa: N815
    mediaType: Json = None  # noqa: N815


@dataclass(frozen=True)
class _Resource(Excerpt):
    algorithm: Literal["sha256"]
    name: Literal["manifest.json", "attestation.json", "attachment.json"]
    digest: Digest


@dataclass(frozen=True)
class _Predicate(Excerpt):
    """The signed files. resources: without any, and with the document's name ignored, it would match any document."""

    resources: Annotated[tuple[_Resource, ...], Len(1, 1), doc("a list of one: a document's signature has one")]


@dataclass(frozen=True)
class _Statement(Excerpt):
    _type: Literal["https://in-toto.io/Statement/v1"]
    predicateType: Literal["https://model_signing/signature/v1.0"]  # noqa: N815
    predicate: _Predicate


@dataclass(frozen=True)
class SignatureBundle:
    """The claims of a signature. key_id: of the key that made it.  certificate: its certificate (DER), if it has one.

    file, digest: file name and SHA-256 of the signed document.  data: the bundle as stored.
    """

    key_id: str
    file: str
    digest: str
    certificate: bytes | None
    data: bytes


def read_bundle(data: bytes) -> SignatureBundle:
    """Parse a stored signature. Raises Malformed unless it is one signature of exactly one file."""
    bundle = parse_as(data, MAX_BYTES, _Bundle)
    statement = parse_as(base64.b64decode(bundle.dsseEnvelope.payload), MAX_BYTES, _Statement)
    (resource,), material = statement.predicate.resources, bundle.verificationMaterial
    if (certificate_text := material.first_certificate) is not None:
        certificate = base64.b64decode(certificate_text)
        return SignatureBundle(_key_id_of_certificate(certificate), resource.name, resource.digest, certificate, data)
    key_id = material.publicKey.hint if material.publicKey else ""
    return SignatureBundle(key_id, resource.name, resource.digest, None, data)


def key_id_of_pem(pem: bytes) -> str:
    """Id of a public key: the SHA-256 of its PEM (SubjectPublicKeyInfo), as in model-signing.

    Raises Malformed if the bytes are no public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        return _key_id(serialization.load_pem_public_key(pem))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Malformed(f"is not a public key in PEM ({error})") from error


def _key_id_of_certificate(der: bytes) -> str:
    """Id of the key in a certificate. Raises Malformed if the bytes are no certificate."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return _key_id(x509.load_der_x509_certificate(der).public_key())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Malformed(f"holds something that is not a certificate ({error})") from error


def _key_id(key: "PublicKeyTypes") -> str:
    from cryptography.hazmat.primitives import serialization

    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def import_model_signing() -> tuple[ModuleType, ModuleType, object]:
    """model-signing's modules `signing` and `verifying`, and its hashing of documents: whole, with SHA-256, no links.

    Raises UnavailableError if the extra is not installed.
    """
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise UnavailableError(
            f"signatures need the extra `signing` ({error}); run `pip install './enginesmith[signing]'` in a clone"
        ) from error
    hashes = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return signing, verifying, hashes


def ask_sigstore(work: Callable[[], object], remedy: str = "check the network") -> None:
    """Call `work`, which uses Sigstore's servers. Raises InputError for a bad token, else UnavailableError."""
    try:
        work()
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0][:300]
        if type(error).__name__ in {"IdentityError", "ExpiredIdentity"}:
            raise InputError(f"Sigstore: {text}; set ENGINESMITH_IDENTITY_TOKEN to a valid token") from error
        raise UnavailableError(f"Sigstore: {text}; {remedy}") from error


@dataclass(frozen=True)
class KeySigner:
    """The holder of the private key of `public_key` (PEM)."""

    name: str
    public_key: bytes
    key_id: str

    def __str__(self) -> str:
        return f"{self.name} (key {self.key_id[:12]})"


@dataclass(frozen=True)
class CertificateSigner:
    """The holder of a certificate for `identity` under one of `roots` (PEM).

    identity: the certificate's common name, or one of its alternative names (DNS, e-mail, URI), with equal case.
    """

    name: str
    roots: tuple[bytes, ...]
    identity: str

    def __str__(self) -> str:
        return f"{self.name} (certificate of {self.identity!r})"


@dataclass(frozen=True)
class KeylessSigner:
    """An OpenID Connect identity that Sigstore's public instance certified. Needs the network; not tested here."""

    name: str
    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.name} ({self.identity!r} by {self.issuer})"


Signer = KeySigner | CertificateSigner | KeylessSigner


def claims(bundle: SignatureBundle, signer: Signer) -> bool:
    """Whether a signature claims to be this signer's. Uses no cryptography, so the claim is unproven."""
    if isinstance(signer, KeySigner):
        return bundle.certificate is None and bundle.key_id == signer.key_id
    if bundle.certificate is None:
        return False
    return isinstance(signer, KeylessSigner) or signer.identity in identities(bundle.certificate)


def objection(bundle: SignatureBundle, signer: Signer, file: str, content: bytes) -> str | None:
    """The reason why this is no valid signature of this document by this signer; None if it is.

    file, content: the document's file name and bytes. Raises UnavailableError without model-signing.
    """
    if (bundle.file, bundle.digest) != (file, digest_of_bytes(content)):
        return f"it is about another {bundle.file} ({bundle.digest[:12]}): it was moved there by hand"
    if not claims(bundle, signer):
        return f"it is not by {signer}"
    import tempfile  # imported here, because a client without a policy does not need it

    _, signing_library, hashing = import_model_signing()
    config = signing_library.Config().set_hashing_config(hashing)
    with tempfile.TemporaryDirectory(prefix="enginesmith-verify-") as folder:
        document_path, signature_path = Path(folder) / "document", Path(folder) / "signature.json"
        document_path.mkdir()
        (document_path / file).write_bytes(content)
        signature_path.write_bytes(bundle.data)
        # Three libraries with their own errors read untrusted bytes here; each error means that the signature is
        # invalid.
        try:
            _use(config, signer, Path(folder))
            config.verify(document_path, signature_path)
        except UnavailableError:
            raise
        except Exception as error:
            return f"it does not verify: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
    return None


def _use(config: "verifying.Config", signer: Signer, folder: Path) -> None:
    if isinstance(signer, KeySigner):
        (folder / "key.pem").write_bytes(signer.public_key)
        config.use_elliptic_key_verifier(public_key=folder / "key.pem")
    elif isinstance(signer, CertificateSigner):
        paths = [folder / f"root{index}.pem" for index in range(len(signer.roots))]
        for path, root in zip(paths, signer.roots, strict=True):
            path.write_bytes(root)
        config.use_certificate_verifier(certificate_chain=paths)
    else:
        ask_sigstore(lambda: config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer))


def identities(der: bytes) -> tuple[str, ...]:
    """The names that a certificate (DER) is issued to: common name, DNS, e-mail, URI. Empty if unreadable."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_der_x509_certificate(der)
        subject_names = [str(a.value) for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return tuple(subject_names)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return ()
    kinds = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier)
    return (*subject_names, *(str(name.value) for name in extension.value if isinstance(name, kinds)))
