"""ServerCertificate: the files with which a router proves itself to clients, and clients to it; read again on change.

Connections that are open stay as they are. It does not know what is served.
"""

import logging
import ssl
from pathlib import Path
from typing import Any, Final, Self

import grpc

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.file_watcher import FileWatcher

_log = logging.getLogger(__name__)
_ALPN: Final = ["http/1.1"]


class ServerCertificate:
    """One for gRPC and HTTP. New files that cannot be used are logged, and the former ones stay."""

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        """Raises InvalidConfig for files that cannot be used."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        # Each has its own look: the first to ask must not be the only one to learn of a change.
        paths = [cert, key, *([client_ca] if client_ca else [])]
        self._for_grpc, self._for_http = FileWatcher(paths), FileWatcher(paths)
        self._context = self._read()

    @classmethod
    def load(cls, cert: str | None, key: str | None, client_ca: str | None) -> Self | None:
        """None without a certificate."""
        return cls(cert, key, client_ca) if cert and key else None

    def look_now(self) -> None:
        """The next connection of either kind gets what the files hold then."""
        self._for_grpc.look_now()
        self._for_http.look_now()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """gRPC asks for a change at each new connection."""
        mutual = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._changed_configuration, mutual)

    def ssl_context(self) -> ssl.SSLContext:
        """For HTTP; it becomes the newest one as a handshake begins."""
        outer = _context(self._cert, self._key, self._client_ca)

        def newest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            if self._for_http.changed():
                try:
                    self._context = self._read()
                    _log.info("the certificate was read again")
                except InvalidConfig as error:
                    _log.error("the certificate has changed and cannot be used; the former one stays: %s", error)
            connection.context = self._context

        outer.sni_callback = newest
        return outer

    def _changed_configuration(self) -> Any:
        if not self._for_grpc.changed():
            return None
        try:
            self._read()  # gRPC itself would say nothing of a key that is another's
            return self._configuration()
        except (InvalidConfig, OSError) as error:
            _log.error("the certificate has changed and cannot be used; the former one stays: %s", error)
            return None

    def _configuration(self) -> Any:
        pair = (Path(self._key).read_bytes(), Path(self._cert).read_bytes())
        roots = Path(self._client_ca).read_bytes() if self._client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _read(self) -> ssl.SSLContext:
        return _context(self._cert, self._key, self._client_ca)


def _context(cert: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    for path in (cert, key, client_ca):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise InvalidConfig(f"the TLS file {path}: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    try:
        # A key with a passphrase would have a server wait for somebody to type it.
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfig(f"{cert} and {key} are no certificate and its key in PEM: {_reason(error)}") from None
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise InvalidConfig(f"{client_ca} has no certificates in PEM: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
