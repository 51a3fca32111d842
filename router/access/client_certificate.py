"""certificate_names(): the names in a client's certificate, as the key file writes them.

    uri:spiffe://cluster/ns/search    email:me@example.org    dns:search.example.org    cn:search

The TLS handshake has checked before that the configured authority signed the certificate.
"""

from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

FORMS: Final = ("uri", "email", "dns", "cn")
_PEM: Final = b"-----BEGIN"


@lru_cache(maxsize=1024)
def certificate_names(certificate: bytes) -> tuple[str, ...]:
    """The names of a certificate in DER or PEM, in the order of FORMS; none if it cannot be read."""
    try:
        load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
        leaf = load(certificate)
        attributes = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        common_names = [f"cn:{attribute.value}" for attribute in attributes if isinstance(attribute.value, str)]
        try:
            alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return tuple(common_names)
        return (
            *(f"uri:{name}" for name in alternatives.get_values_for_type(x509.UniformResourceIdentifier)),
            *(f"email:{name}" for name in alternatives.get_values_for_type(x509.RFC822Name)),
            *(f"dns:{name.lower()}" for name in alternatives.get_values_for_type(x509.DNSName)),
            *common_names,
        )
    except ValueError:  # includes DuplicateExtension
        return ()
