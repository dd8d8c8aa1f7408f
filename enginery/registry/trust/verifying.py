"""Whether a signature was made by a signer that a policy names. Without the right key a signature is worth nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import UnavailableError
from enginery.registry.trust.bundles import Bundle
from enginery.registry.trust.library import model_signing


@dataclass(frozen=True)
class KeySigner:
    """Whoever holds the private key of `public_key` (PEM)."""

    name: str
    public_key: bytes
    key_id: str

    def __str__(self) -> str:
        return f"{self.name} (key {self.key_id[:12]})"


@dataclass(frozen=True)
class CertificateSigner:
    """Whoever holds a certificate under one of `roots` (PEM) that is made out to `identity`.

    identity: the certificate's common name, or one of its alternative names (DNS, e-mail, URI), letter for letter.
    """

    name: str
    roots: tuple[bytes, ...]
    identity: str

    def __str__(self) -> str:
        return f"{self.name} (certificate of {self.identity!r})"


@dataclass(frozen=True)
class KeylessSigner:
    """An OpenID Connect identity, as Sigstore's public instance certifies it. Needs the network; not run here."""

    name: str
    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.name} ({self.identity!r} by {self.issuer})"


Signer = KeySigner | CertificateSigner | KeylessSigner


def claims(bundle: Bundle, signer: Signer) -> bool:
    """Whether a signature says that it is this signer's; cheap, and proves nothing."""
    if isinstance(signer, KeySigner):
        return bundle.certificate is None and bundle.key_id == signer.key_id
    if bundle.certificate is None:
        return False
    return isinstance(signer, KeylessSigner) or signer.identity in identities(bundle.certificate)


def objection(bundle: Bundle, signer: Signer, file: str, content: bytes) -> str | None:
    """Why this signature is not the signer's word for this document; None if it is. Raises UnavailableError."""
    if (bundle.file, bundle.digest) != (file, digest_of_bytes(content)):
        return f"it is about another {bundle.file} ({bundle.digest[:12]}): it was moved there by hand"
    if not claims(bundle, signer):
        return f"it is not by {signer}"
    import tempfile  # here, because a client without a policy does without

    library = model_signing()
    config = library.verifying.Config().set_hashing_config(library.hashing_config())
    with tempfile.TemporaryDirectory(prefix="enginery-verify-") as folder:
        place, stored = Path(folder) / "document", Path(folder) / "signature.json"
        place.mkdir()
        (place / file).write_bytes(content)
        stored.write_bytes(bundle.data)
        # Hostile bytes meet three libraries here, each with errors of its own; every one of them means no.
        try:
            _use(config, signer, Path(folder))
            config.verify(place, stored)
        except UnavailableError:
            raise
        except Exception as error:
            return f"it does not verify: {_said(error)}"
    return None


def _use(config: Any, signer: Signer, folder: Path) -> None:
    if isinstance(signer, KeySigner):
        (folder / "key.pem").write_bytes(signer.public_key)
        config.use_elliptic_key_verifier(public_key=folder / "key.pem")
    elif isinstance(signer, CertificateSigner):
        paths = [folder / f"root{index}.pem" for index in range(len(signer.roots))]
        for path, root in zip(paths, signer.roots, strict=True):
            path.write_bytes(root)
        config.use_certificate_verifier(certificate_chain=paths)
    else:
        config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.issuer)


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def identities(der: bytes) -> tuple[str, ...]:
    """Whom a certificate is made out to. Empty for one whose names cannot be read."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_der_x509_certificate(der)
        names = [str(item.value) for item in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return tuple(names)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return ()
    kinds = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier)
    return (*names, *(str(item.value) for item in extension.value if isinstance(item, kinds)))
