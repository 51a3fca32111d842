"""Authenticator: which tenant a request comes from, by its key or by the client's certificate.

The key file names both, and is read again when it changes.
"""

import base64
import binascii
import logging
import time
from collections.abc import Callable

from coatcheck.proto.errors import InvalidConfig, PermissionDenied, Unauthenticated
from coatcheck.router.access.file_watcher import FileWatcher
from coatcheck.router.access.key_file import KnownTenants, certificate_names, hash_key, read_keys
from coatcheck.router.access.tenant import ANONYMOUS, Scope, Tenant

_log = logging.getLogger(__name__)
_HOW = "send a key as `authorization: Bearer KEY`"


class Authenticator:
    """Without a key file every request comes from ANONYMOUS."""

    def __init__(
        self,
        key_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Raises InvalidConfig if the file cannot be read. `on_refused` gets the reason of each refusal."""
        self._file = key_file
        self._on_refused = on_refused
        self._watcher = FileWatcher([key_file] if key_file else [], clock)
        self._tenants = read_keys(key_file) if key_file else KnownTenants()

    @property
    def is_enabled(self) -> bool:
        return self._file is not None

    def authenticate(
        self, authorization: str | None, scope: Scope, *, basic: bool = False, certificate: bytes | None = None
    ) -> Tenant:
        """The tenant of a request. Raises Unauthenticated, or PermissionDenied if its role does not have `scope`.

        `authorization`: the header or metadata of that name. `basic`: also accept a key as the password of HTTP's basic
        authentication, the only kind that browsers offer. `certificate`: the client's, in DER or PEM; used only without
        `authorization`.
        """
        if self._file is None:
            return ANONYMOUS
        if self._watcher.has_changed():
            self._reload(self._file)
        try:
            if authorization:
                tenant = self._tenant_of_key(_parse_authorization(authorization, basic))
            else:
                tenant = self._tenant_of_certificate(certificate)
            tenant.require_scope(scope)
        except (Unauthenticated, PermissionDenied) as error:
            self._on_refused("unauthenticated" if isinstance(error, Unauthenticated) else "permission_denied")
            raise
        return tenant

    def _tenant_of_key(self, key: str) -> Tenant:
        tenant = self._tenants.by_key_hash.get(hash_key(key))
        if tenant is None:
            raise Unauthenticated("invalid API key; it may have been revoked, or be for another server")
        return tenant

    def _tenant_of_certificate(self, certificate: bytes | None) -> Tenant:
        if not certificate:
            raise Unauthenticated(f"no API key was sent; {_HOW}")
        names = certificate_names(certificate)
        for name in names:
            if tenant := self._tenants.by_certificate.get(name):
                return tenant
        known = ", ".join(names) or "no name"
        raise Unauthenticated(f"no tenant has the certificate of this client ({known[:200]}); {_HOW}")

    def _reload(self, file: str) -> None:
        try:
            self._tenants = read_keys(file)
            _log.info("the key file was read again")
        except InvalidConfig as error:
            _log.error("the key file has changed and cannot be read; its former keys stay valid: %s", error)


def _parse_authorization(authorization: str, basic: bool) -> str:
    """The key; raises Unauthenticated for other schemes than Bearer and, with `basic`, Basic."""
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip()
    if scheme.lower() == "bearer" and key:
        return key
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(key, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            pass
    raise Unauthenticated(f"unsupported authorization scheme; {_HOW}")
