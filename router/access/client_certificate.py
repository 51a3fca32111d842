"""names_in(): by which names a client's certificate may be known, in the form that the keys file has them in.

    uri:spiffe://cluster/ns/search    email:me@example.org    dns:search.example.org    cn:search

That an authority of ours has signed it was checked as the connection was made. It does not know tenants.
"""

from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

FORMS: Final = ("uri", "email", "dns", "cn")
_PEM: Final = b"-----BEGIN"


@lru_cache(maxsize=1024)
def names_in(certificate: bytes) -> tuple[str, ...]:
    """Of one in DER or PEM, those that say most first. One that cannot be read has none."""
    try:
        read = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
        leaf = read(certificate)
        commons = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        names = [f"cn:{common.value}" for common in commons if isinstance(common.value, str)]
        try:
            others = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return tuple(names)
        return (
            *(f"uri:{name}" for name in others.get_values_for_type(x509.UniformResourceIdentifier)),
            *(f"email:{name}" for name in others.get_values_for_type(x509.RFC822Name)),
            *(f"dns:{name.lower()}" for name in others.get_values_for_type(x509.DNSName)),
            *names,
        )
    except ValueError:  # also what the library raises of an extension that is there twice
        return ()
