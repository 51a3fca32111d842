"""Credentials: the TLS authority, client certificate and API key with which a client connects to a router."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import grpc
import typer

from coatcheck.cluster.config.settings import set_parameters
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import is_loopback

if TYPE_CHECKING:
    import ssl

_SYSTEM: Final = "system"
# How long a channel tries to connect before a call fails. gRPC's default of 20 s is long for a user of a suspended
# router: the router's host accepts the connection, and nothing answers. A busy router answers in time, because gRPC's
# own threads complete the connection, without Python.
CONNECT_SECONDS: Final = 8.0

_ACCESS: Final[Any] = partial(typer.Option, rich_help_panel="Access")

# The options of every command that calls a router.
_OPTIONS: Final = {
    "tls_ca": _ACCESS(
        envvar="COATCHECK_TLS_CA", help="Use TLS and trust this authority (a PEM file; system: the host's)."
    ),
    "tls_cert": _ACCESS(envvar="COATCHECK_TLS_CERT", help="The client's certificate, if the router requires one."),
    "tls_key": _ACCESS(envvar="COATCHECK_TLS_KEY", help="The key of --tls-cert."),
    "api_key": _ACCESS(
        envvar="COATCHECK_API_KEY",
        help="The API key. Prefer the environment: other users see arguments.",
        show_envvar=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Default: no TLS and no API key."""

    roots: bytes | None = None  # None with `tls`: the host's authorities
    tls: bool = False
    pair: tuple[bytes, bytes] | None = field(default=None, repr=False)  # key and certificate, in PEM
    api_key: str | None = field(default=None, repr=False)
    https: "ssl.SSLContext | None" = field(default=None, repr=False, compare=False)  # with `tls`: for a call over HTTPS

    @classmethod
    def build(cls, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, api_key: str | None) -> Self:
        """Build them from PEM files (`tls_ca` may be "system") and an API key. Raise InvalidConfig for values that
        cannot be used."""
        if bool(tls_cert) != bool(tls_key):
            raise InvalidConfig("--tls-cert and --tls-key belong together; give both")
        if tls_cert and not tls_ca:
            raise InvalidConfig("--tls-cert needs --tls-ca: the authority that signed the router's certificate")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidConfig("the API key contains characters that no key has; copy the key exactly")
        roots = _read(tls_ca) if tls_ca and tls_ca != _SYSTEM else None
        pair = (_read(tls_key), _read(tls_cert)) if tls_cert and tls_key else None
        https = _https_context(tls_ca, tls_cert, tls_key) if tls_ca else None
        return cls(roots, bool(tls_ca), pair, api_key, https)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        options = [*options, *_options(address)]
        if not self.tls:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._credentials(), options=options)

    def blocking_channel(self, address: str) -> grpc.Channel:
        options = _options(address)
        if not self.tls:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._credentials(), options=options)

    def _credentials(self) -> grpc.ChannelCredentials:
        key, certificate = self.pair or (None, None)
        return grpc.ssl_channel_credentials(self.roots, key, certificate)


def _options(address: str) -> list[tuple[str, Any]]:
    """Options of a channel to `address`.

    They turn http_proxy off for a loopback address: a proxy cannot reach this host's loopback interface.
    """
    host = address.rpartition(":")[0]
    # Despite its name this is also gRPC's time limit of connecting.
    options = [("grpc.min_reconnect_backoff_ms", round(1000 * CONNECT_SECONDS))]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_loopback(host) else options


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a Typer command so that its parameter `credentials` comes from the options of _OPTIONS."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "credentials":
            parameters.append(parameter)
            continue
        for name, option in _OPTIONS.items():
            annotation = Annotated[str | None, option]
            parameters.append(parameter.replace(name=name, annotation=annotation, default=None))

    @wraps(command)
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _OPTIONS}
        try:
            credentials = Credentials.build(**given)
        except InvalidConfig as error:
            raise typer.BadParameter(str(error)) from None
        command(credentials=credentials, **arguments)

    return set_parameters(run, parameters)


def _https_context(tls_ca: str, tls_cert: str | None, tls_key: str | None) -> "ssl.SSLContext":
    """Raise InvalidConfig for files that are not valid PEM. gRPC would fail to connect and give no reason."""
    import ssl  # imported here because commands without TLS do not need it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls_ca == _SYSTEM:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(Path(tls_ca).expanduser())
        except ssl.SSLError:
            raise InvalidConfig(f"--tls-ca {tls_ca} holds no certificate in PEM") from None
    if tls_cert and tls_key:
        try:
            # Without a password OpenSSL would ask for one on the terminal. An empty password refuses encrypted keys.
            context.load_cert_chain(Path(tls_cert).expanduser(), Path(tls_key).expanduser(), password="")
        except ssl.SSLError:
            pair = f"--tls-cert {tls_cert} and --tls-key {tls_key}"
            raise InvalidConfig(f"{pair} are not a certificate and its key, unencrypted and in PEM") from None
    return context


def _read(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{file}: {error.strerror or error}") from None
