"""ClusterCA: signs the certificates of one cluster's own connections. Made anew with each cluster, kept in no file.

It does not know who asks for a certificate, nor where that goes.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coatcheck.proto.plane_certificate import GROUP, ROUTER, PlaneCertificate

# Longer than any cluster runs; its end is the end of the authority, not a date.
_LIFETIME: Final = datetime.timedelta(days=3650)
_CLOCKS_DIFFER: Final = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class PlaneCertificates:
    """What routers and groups of one cluster show each other; None: their connections are plain."""

    router: PlaneCertificate | None = None
    group: PlaneCertificate | None = None

    @classmethod
    def signed_by(cls, authority: "ClusterCA") -> Self:
        """A new pair."""
        return cls(authority.for_router(), authority.for_group())


class ClusterCA:
    """Hands out leaves that are good for one side of a connection."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coatcheck cluster")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key()).add_extension(constraints, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def for_router(self) -> PlaneCertificate:
        """Opens connections to groups."""
        return self._issue(ROUTER, [ExtendedKeyUsageOID.CLIENT_AUTH])

    def for_group(self) -> PlaneCertificate:
        """Takes connections from routers."""
        return self._issue(GROUP, [ExtendedKeyUsageOID.SERVER_AUTH])

    def _issue(self, name: str, uses: Sequence[x509.ObjectIdentifier]) -> PlaneCertificate:
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
        return PlaneCertificate(
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
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(now + _LIFETIME)
        )
