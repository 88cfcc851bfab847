"""Make the certificate authority and the SuperLink's certificate: ``python -m jobs.tls``.

Whatever exists and is good for another month is kept, so that this may run at every start.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpsa_strategy.files import PRIVATE, PUBLIC, write_atomically

NAMES = ("superlink", "superlink-control", "localhost", "127.0.0.1", "::1")
"""What the SuperLink is called on the compose networks and in its own container."""

_CA_DAYS = 3650
_SERVER_DAYS = 365
_RENEW_BEFORE = timedelta(days=30)
# Clocks of nodes may be a little behind.
_BACKDATE = timedelta(minutes=10)


def ensure_certificates(ca_dir: Path, tls_dir: Path, trust_dir: Path, names: Sequence[str]) -> None:
    """Make what is missing, damaged, about to expire, or not made for these names.

    A key that does not belong to its certificate, and a certificate that another authority signed,
    count as missing.

    Parameters
    ----------
    ca_dir : Path
        Gets ``ca.key``, which nothing but this job ever needs.
    tls_dir : Path
        Gets ``server.key`` and ``server.pem``, for the SuperLink.
    trust_dir : Path
        Gets ``ca.pem``, for everyone.
    names : Sequence[str]
        Host names and addresses under which the SuperLink is reached.
    """
    ca_key, ca = _ensure_authority(ca_dir / "ca.key", trust_dir / "ca.pem")
    key_path, certificate_path = tls_dir / "server.key", tls_dir / "server.pem"
    pair = _pair(key_path, certificate_path)
    if pair is not None and _signed_by(pair[1], ca) and _names(pair[1]) == set(names):
        print("The SuperLink's certificate is still good.")
        return
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = (
        _builder("superlink", key.public_key(), ca.subject, _SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    write_atomically(key_path, _private_bytes(key), mode=PRIVATE)
    write_atomically(certificate_path, certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
    print(f"New certificate of the SuperLink, for {', '.join(names)}.")


def _ensure_authority(
    key_path: Path, certificate_path: Path
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    pair = _pair(key_path, certificate_path)
    if pair is not None:
        return pair
    key = ec.generate_private_key(ec.SECP384R1())
    # A subject of its own for each authority: a certificate of an earlier one is then told apart.
    name = f"fedpsa authority {x509.random_serial_number():x}"[:40]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(name, key.public_key(), subject, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_atomically(key_path, _private_bytes(key), mode=PRIVATE)
    write_atomically(certificate_path, certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
    print("New certificate authority.")
    return key, certificate


def _pair(
    key_path: Path, certificate_path: Path
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None:
    """Return a key and its certificate if both are whole, belong together and are good for long."""
    try:
        key = load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (FileNotFoundError, ValueError):  # absent, or damaged
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SystemExit(f"{key_path} is not an elliptic-curve key.")
    if key.public_key() != certificate.public_key() or not _good(certificate):
        return None
    return key, certificate


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    common_name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - _BACKDATE
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _good(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) > _RENEW_BEFORE


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _names(certificate: x509.Certificate) -> set[str]:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(name.value) for name in extension.value}


def main() -> None:
    """Make the certificates of a deployment."""
    extra = [name.strip() for name in os.environ.get("TLS_NAMES", "").split(",")]
    names = list(dict.fromkeys([*NAMES, *(name for name in extra if name)]))
    ensure_certificates(Path("/ca"), Path("/tls"), Path("/trust"), names)


if __name__ == "__main__":
    main()
