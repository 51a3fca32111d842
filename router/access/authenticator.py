"""Authenticator: who may come in. Keys are known by their hashes, clients' certificates by their names.

The file that holds both may change at any time.

It does not know how a key is carried, but for the two forms of HTTP's `authorization`, which gRPC shares.
"""

import base64
import binascii
import logging
import time
from collections.abc import Callable

from coatcheck.proto.errors import InvalidConfig, PermissionDenied, Unauthenticated
from coatcheck.router.access.client_certificate import names_in
from coatcheck.router.access.file_watcher import FileWatcher
from coatcheck.router.access.key_file import hash_key, read_keys
from coatcheck.router.access.tenant import ANYONE, Scope, Tenant

_log = logging.getLogger(__name__)
_HOW = "send a key as `authorization: Bearer KEY`"


class Authenticator:
    """Without a file of keys everybody is ANYONE."""

    def __init__(
        self,
        keys_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Raises InvalidConfig when the file cannot be read. `on_refused` is told why somebody is."""
        self._file = keys_file
        self._on_refused = on_refused
        self._watched = FileWatcher([keys_file] if keys_file else [], clock)
        self._tenants = read_keys(keys_file) if keys_file else {}

    @property
    def asks(self) -> bool:
        """Whether it asks anybody for anything."""
        return self._file is not None

    def admit(
        self, authorization: str | None, scope: Scope, *, basic: bool = False, certificate: bytes | None = None
    ) -> Tenant:
        """Who comes; raises Unauthenticated, or PermissionDenied where the scope is not theirs.

        `basic`: a key may also come as the password of HTTP's basic authentication, which is all that browsers have.
        `certificate`: what the client has shown of itself, which counts where it sends no key.
        """
        if self._file is None:
            return ANYONE
        if self._watched.changed():
            self._read_again(self._file)
        try:
            tenant = self._of_key(authorization, basic) if authorization else self._of_certificate(certificate)
            tenant.require(scope)
        except (Unauthenticated, PermissionDenied) as error:
            self._on_refused("unauthenticated" if isinstance(error, Unauthenticated) else "permission_denied")
            raise
        return tenant

    def _of_key(self, authorization: str, basic: bool) -> Tenant:
        tenant = self._tenants.get(hash_key(_key_in(authorization, basic)))
        if tenant is None:
            raise Unauthenticated("this key is not known here; it may have been withdrawn, or be another server's")
        return tenant

    def _of_certificate(self, certificate: bytes | None) -> Tenant:
        names = names_in(certificate) if certificate else ()
        for name in names:
            if tenant := self._tenants.get(name):
                return tenant
        if certificate:
            known = ", ".join(names) or "no name"
            raise Unauthenticated(f"no tenant has the certificate of this client ({known[:200]}); {_HOW}")
        raise Unauthenticated(f"this server asks for a key; {_HOW}")

    def _read_again(self, file: str) -> None:
        try:
            self._tenants = read_keys(file)
            _log.info("the keys file was read again")
        except InvalidConfig as error:
            _log.error("the keys file has changed and cannot be read; its former keys stay: %s", error)


def _key_in(authorization: str, basic: bool) -> str:
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip()
    if scheme.lower() == "bearer" and key:
        return key
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(key, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            pass
    raise Unauthenticated(f"the authorization is none that this server knows; {_HOW}")
