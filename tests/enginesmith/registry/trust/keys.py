"""Keys and certificates for the tests, made afresh in memory and on disk."""

from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Private = ec.EllipticCurvePrivateKey


@cache
def private(_name: str) -> Private:
    """The key that goes by a name, the same in all tests."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: Private, password: bytes | None = None) -> bytes:
    guard = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, guard)


def public_pem(key: Private) -> bytes:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, kind)


def written(folder: Path, name: str) -> tuple[Path, Path]:
    secret, public_path = folder / f"{name}.pem", folder / f"{name}.pub"
    secret.write_bytes(private_pem(private(name)))
    public_path.write_bytes(public_pem(private(name)))
    return secret, public_path


def certificate(
    folder: Path, name: str, issuer: str | None = None, *, san: str | None = None, days: tuple[int, int] = (-1, 30)
) -> Path:
    """A certificate of the key `name`, self-signed (a root) or by `issuer`; valid between two days from now."""
    current_time = datetime.now(UTC)
    usage = x509.KeyUsage(True, False, False, False, False, issuer is None, False, False, False)
    extension = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer or name)]))
        .public_key(private(name).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(current_time + timedelta(days=days[0]))
        .not_valid_after(current_time + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(usage, critical=True)
    )
    if san:
        extension = extension.add_extension(x509.SubjectAlternativeName([x509.RFC822Name(san)]), critical=False)
    path = folder / f"{name}.crt"
    certificate = extension.sign(private(issuer or name), hashes.SHA256())
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
