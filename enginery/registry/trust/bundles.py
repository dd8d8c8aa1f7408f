"""A signature as it is stored: a Sigstore bundle around an in-toto statement, as OpenSSF model-signing writes it.

Read here without any cryptography, and strictly, before a library sees it: what it is about, and which key it says it
is from. Both are claims until `verifying` has checked them.
"""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any

from enginery.core import parsing
from enginery.core.parsing import Malformed, field

MAX_BYTES = 256 << 10
# The name under which a document is signed, so that no signature of one kind is taken for one of another.
MANIFEST_FILE = "manifest.json"
ATTESTATION_FILE = "attestation.json"

_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_MATERIALS = ("publicKey", "certificate", "x509CertificateChain")
_PREDICATE = "https://model_signing/signature/v1.0"


@dataclass(frozen=True)
class Bundle:
    """What a signature claims. key_id: of the key that made it.  certificate: its certificate (DER), if it has one.

    file, digest: name and SHA-256 of the document it is about.  data: the bundle as it is stored.
    """

    key_id: str
    file: str
    digest: str
    certificate: bytes | None
    data: bytes


def read_bundle(data: bytes) -> Bundle:
    """Read a stored signature. Raises Malformed for what is not one signature of exactly one file."""
    document = parsing.parse_json(data, MAX_BYTES)
    _only(document, "document", "mediaType", "verificationMaterial", "dsseEnvelope")
    material = field(document, "verificationMaterial", parsing.mapping)
    envelope = field(document, "dsseEnvelope", parsing.mapping)
    _only(envelope, "dsseEnvelope", "payload", "payloadType", "signatures")
    if (kind := field(envelope, "payloadType", parsing.text, "dsseEnvelope")) != _PAYLOAD:
        raise Malformed(f"dsseEnvelope.payloadType is {kind[:80]!r}; it must be {_PAYLOAD}")
    if len(field(envelope, "signatures", parsing.many(parsing.mapping), "dsseEnvelope")) != 1:
        raise Malformed("dsseEnvelope.signatures must hold exactly one signature")
    payload = parsing.parse_json(field(envelope, "payload", _base64, "dsseEnvelope"), MAX_BYTES)
    file, digest = _resource(payload)
    certificate = _certificate(material)
    key_id = _hint(material) if certificate is None else key_id_of_certificate(certificate)
    return Bundle(key_id, file, digest, certificate, data)


def key_id_of_pem(pem: bytes) -> str:
    """Id of a public key: the SHA-256 of its PEM (SubjectPublicKeyInfo), as model-signing has it.

    Raises Malformed for what is no public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        return _key_id(serialization.load_pem_public_key(pem))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Malformed(f"is no public key in PEM ({error})") from error


def key_id_of_certificate(der: bytes) -> str:
    """Id of the key in a certificate. Raises Malformed for what is no certificate."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return _key_id(x509.load_der_x509_certificate(der).public_key())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Malformed(f"holds what is no certificate ({error})") from error


def _key_id(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _resource(payload: dict[str, Any]) -> tuple[str, str]:
    for name, wanted in (("_type", _STATEMENT), ("predicateType", _PREDICATE)):
        if (found := field(payload, name, parsing.text, "payload")) != wanted:
            raise Malformed(f"payload.{name} is {found[:80]!r}; it must be {wanted}")
    predicate = field(payload, "predicate", parsing.mapping, "payload")
    resources = field(predicate, "resources", parsing.many(parsing.mapping), "payload.predicate")
    # A signature of no file, with the document's name among the ignored ones, would agree with any document.
    if len(resources) != 1:
        raise Malformed(f"payload.predicate.resources has {len(resources)} items; a document's signature has one")
    where = "payload.predicate.resources[0]"
    field(resources[0], "algorithm", parsing.one_of("sha256"), where)
    file = field(resources[0], "name", parsing.one_of(MANIFEST_FILE, ATTESTATION_FILE), where)
    return file, field(resources[0], "digest", parsing.digest, where)


def _certificate(material: dict[str, Any]) -> bytes | None:
    where = "verificationMaterial"
    _only(material, where, *_MATERIALS, "tlogEntries", "timestampVerificationData")
    if (found_kinds := sum(kind in material for kind in _MATERIALS)) != 1:
        raise Malformed(f"{where} has {found_kinds} of {', '.join(_MATERIALS)}; it must have one")
    if "certificate" in material:
        return field(field(material, "certificate", parsing.mapping, where), "rawBytes", _base64, where)
    if "x509CertificateChain" not in material:
        return None
    chain = field(material, "x509CertificateChain", parsing.mapping, where)
    found = field(chain, "certificates", parsing.many(parsing.mapping), where)
    if not found or len(found) > 16:
        raise Malformed(f"{where}.x509CertificateChain has {len(found)} certificates; 1 to 16 are read")
    return field(found[0], "rawBytes", _base64, f"{where}.x509CertificateChain.certificates[0]")


def _only(data: dict[str, Any], path: str, *known: str) -> None:
    """No field but the known ones: a library that also takes another spelling must not find one here."""
    if unknown := sorted(set(data) - set(known)):
        raise Malformed(f"{path}.{unknown[0][:80]} is no field of a signature")


def _hint(material: dict[str, Any]) -> str:
    key = field(material, "publicKey", parsing.mapping, "verificationMaterial")
    return field(key, "hint", parsing.digest, "verificationMaterial.publicKey")


def _base64(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(parsing.text(value, path), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{path} is not base64 ({error})") from error
