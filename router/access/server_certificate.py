"""ServerCertificate: the TLS certificate of a router and the authority of its clients, read again on change.

New connections get the new certificate; open ones stay as they are.
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
_NOT_USABLE: Final = "the certificate has changed and cannot be used; the former one stays: %s"


class ServerCertificate:
    """The certificate for gRPC and HTTP. If changed files cannot be used, an error is logged and the former ones
    stay."""

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        """Raises InvalidConfig for files that cannot be used."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        # One watcher each: a change that gRPC has seen must still reach HTTP.
        paths = [cert, key, *([client_ca] if client_ca else [])]
        self._grpc_watcher, self._http_watcher = FileWatcher(paths), FileWatcher(paths)
        self._context = self._load_context()

    @classmethod
    def load(cls, cert: str | None, key: str | None, client_ca: str | None) -> Self | None:
        """The certificate in these files; None if `cert` or `key` is unset. Raises InvalidConfig."""
        return cls(cert, key, client_ca) if cert and key else None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that check for a changed certificate at each new connection."""
        mutual = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._grpc_configuration(), self._changed_configuration, mutual)

    def ssl_context(self) -> ssl.SSLContext:
        """A context whose handshakes use the newest certificate."""
        outer = self._load_context()

        def use_newest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            if self._http_watcher.has_changed():
                try:
                    self._context = self._load_context()
                    _log.info("the certificate was read again")
                except InvalidConfig as error:
                    _log.error(_NOT_USABLE, error)
            connection.context = self._context

        outer.sni_callback = use_newest
        return outer

    def _changed_configuration(self) -> Any:
        if not self._grpc_watcher.has_changed():
            return None
        try:
            self._load_context()  # gRPC itself does not report a key that belongs to another certificate
            return self._grpc_configuration()
        except (InvalidConfig, OSError) as error:
            _log.error(_NOT_USABLE, error)
            return None

    def _grpc_configuration(self) -> Any:
        pair = (Path(self._key).read_bytes(), Path(self._cert).read_bytes())
        roots = Path(self._client_ca).read_bytes() if self._client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def _load_context(self) -> ssl.SSLContext:
        """Raises InvalidConfig, naming the file."""
        for path in (self._cert, self._key, self._client_ca):
            try:
                if path:
                    Path(path).read_bytes()
            except OSError as error:
                raise InvalidConfig(f"the TLS file {path}: {error.strerror or error}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        try:
            # Without `password` OpenSSL would wait at the terminal for the passphrase of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password=_refuse_passphrase)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidConfig(
                f"{self._cert} and {self._key} are not a certificate and its key in PEM: {_reason(error)}"
            ) from None
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise InvalidConfig(f"{self._client_ca} has no certificates in PEM: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
