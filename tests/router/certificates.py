"""Certificates for tests: an authority, and the certificates of servers and clients as files, valid or expired."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Leaf:
    """The files of a certificate and its key."""

    cert: Path
    key: Path


class TestAuthority:
    """`ca`: the file of the authority's certificate. `leaf` writes a certificate and its key for 127.0.0.1 and
    localhost."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), self._key.public_key(), days=1)
            .add_extension(constraints, critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def leaf(self, name: str, *, days: float = 1) -> Leaf:
        """Valid for `days`; negative for an expired certificate. Existing files are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            _builder(_named(name), self._name, key.public_key(), self._key.public_key(), days=days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        leaf = Leaf(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        leaf.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        leaf.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return leaf


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    *,
    days: float,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=days))
        # Python 3.13 and later refuse certificates without these.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )
