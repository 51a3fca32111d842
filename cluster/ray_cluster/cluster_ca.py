"""Signs the certificates with which the routers and groups of one cluster authenticate each other by mutual TLS.

Each cluster has its own certificate authority. Its key is discarded once both certificates are signed.
"""

import datetime
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coatcheck.proto.internal_tls import GROUP, ROUTER, ClusterCertificate

_LIFETIME: Final = datetime.timedelta(days=3650)  # longer than any cluster runs
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)  # between hosts


@dataclass(frozen=True)
class CertificatesByRole:
    """The certificates of a cluster's routers and of its groups. None: their connections are not encrypted."""

    router: ClusterCertificate | None = None
    group: ClusterCertificate | None = None


def sign_certificates() -> CertificatesByRole:
    """Certificates of a new authority. The router's is valid for TLS clients only, the group's for servers only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coatcheck cluster")])
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, name, key).add_extension(constraints, critical=True)
    authority = builder.sign(key, hashes.SHA256())
    return CertificatesByRole(
        router=_sign(ROUTER, ExtendedKeyUsageOID.CLIENT_AUTH, authority, key),
        group=_sign(GROUP, ExtendedKeyUsageOID.SERVER_AUTH, authority, key),
    )


def _sign(
    role: str, use: x509.ObjectIdentifier, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey
) -> ClusterCertificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
    leaf = (
        _builder(subject, authority.subject, key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(role)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return ClusterCertificate(
        certificate=leaf.public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        authority=authority.public_bytes(pem),
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
    )
