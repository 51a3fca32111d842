"""ClusterCA: the certificate authority of one cluster, for mutual TLS between its routers and groups.

Each cluster has its own authority. The key exists only in the memory of the process that starts the cluster.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coatcheck.proto.internal_tls import GROUP, ROUTER, ClusterCertificate

_LIFETIME: Final = datetime.timedelta(days=3650)  # longer than any cluster runs
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)  # between hosts


@dataclass(frozen=True)
class ClusterCertificates:
    """The certificates of a cluster's routers and of its groups. None: their connections are not encrypted."""

    router: ClusterCertificate | None = None
    group: ClusterCertificate | None = None

    @classmethod
    def sign_pair(cls, authority: "ClusterCA") -> Self:
        """A new certificate for routers and a new one for groups."""
        return cls(authority.sign_router_certificate(), authority.sign_group_certificate())


class ClusterCA:
    """A self-signed authority. Each certificate that it signs is valid for one side of a connection only."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coatcheck cluster")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key()).add_extension(constraints, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def sign_router_certificate(self) -> ClusterCertificate:
        """A client certificate: it opens connections to groups."""
        return self._sign(ROUTER, [ExtendedKeyUsageOID.CLIENT_AUTH])

    def sign_group_certificate(self) -> ClusterCertificate:
        """A server certificate: it accepts connections from routers."""
        return self._sign(GROUP, [ExtendedKeyUsageOID.SERVER_AUTH])

    def _sign(self, name: str, uses: Sequence[x509.ObjectIdentifier]) -> ClusterCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        leaf = (
            self._builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return ClusterCertificate(
            certificate=leaf.public_bytes(pem),
            key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            authority=self._certificate.public_bytes(pem),
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _LIFETIME)
        )
