"""Finds the Ray cluster that `--ray-address` means, and checks that a Ray head listens there.

Ray itself would notice only after a minute or never: `auto` may name a cluster that ended long ago. This module does
not import Ray.
"""

import os
import socket
from contextlib import suppress

import grpc
import psutil

from coatcheck.cluster.config.address import split_address
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.local_ray import find_local_rays, ray_folder, read_token
from coatcheck.cluster.ray_cluster.ray_environment import TOKEN_HELP, enable_user_token, environment_token
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.workers.host.safe_files import read_file

_CONNECT_SECONDS = 5.0
_MAX_BYTES = 4096
_EXAMPLE = "127.0.0.1:6379"
_HEAD_FLAG = "--gcs-address="  # of the raylets and their workers
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a call that the head answers even if the request is empty


def find_ray(written: str, *, own: bool = False) -> str:
    """HOST:PORT of the Ray head that `written` (HOST:PORT or "auto") means. Raises InvalidConfig or Unavailable.

    `own`: find a Ray on which Coatcheck already runs. Then "auto" also finds a Ray that `coatcheck serve` has started.
    If several run, InvalidConfig is raised, because the newest may not be the one that the user means.
    """
    address, source = _resolve(written, own)
    if written == "auto" and address != os.environ.get("RAY_ADDRESS"):
        enable_user_token()
    try:
        _connect(address)
    except OSError as error:
        running = _describe_running_rays() if written == "auto" else ""
        raise _unavailable(address, source, f"{error.strerror or error}{running}", own) from None
    # If another program listens there, Ray would try to speak gRPC with that program for minutes.
    if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
        _check_head(address, source, own)
    return address


def is_listening(address: str) -> bool:
    """Whether anything accepts connections at HOST:PORT."""
    with suppress(OSError, InvalidConfig):
        _connect(address)
        return True
    return False


def _resolve(written: str, own: bool) -> tuple[str, str]:
    """(address, source): `source` is a clause for messages that says where the address comes from."""
    if written != "auto":
        return written, ""
    # Ray's own search order without its last step, which takes any Ray among the processes of this host.
    if (named := os.environ.get("RAY_ADDRESS", "auto")) not in ("", "auto"):
        return named, ", which RAY_ADDRESS names"
    file = ray_folder() / "ray_current_cluster"
    started: list[tuple[int, str]] = find_local_rays(ray_folder()) if own else []
    started = [(when, address) for when, address in started if is_listening(address)]
    with suppress(OSError):
        last = (file.stat().st_mtime_ns, read_file(file, _MAX_BYTES).strip())
        if not started or is_listening(last[1]):  # not a Ray that has ended, if another one runs
            started.append(last)
    # Compared by port, because Ray may have recorded the same cluster under another address of this host.
    ports = {_port(address): address for _, address in reversed(started)}
    if len(ports) > 1:
        raise InvalidConfig(
            f"{len(ports)} Ray clusters run on this host: {', '.join(sorted(ports.values()))}; choose one with "
            "--ray-address (`coatcheck serve` prints the address of its Ray when it starts)"
        )
    if not started:
        reason = f"RAY_ADDRESS is not set, and there is no {file}"
        remedy = f"start one with `{'coatcheck serve' if own else 'ray start --head'}`, or give HOST:PORT"
        if running := _describe_running_rays():
            raise InvalidConfig(f"--ray-address auto names no Ray cluster ({reason}){running}; {remedy}")
        other = " and no `coatcheck serve` of this user that has started one" if own else ""
        raise InvalidConfig(f"--ray-address auto finds no Ray cluster on this host{other} ({reason}); {remedy}")
    return max(started)[1], f", the last one started on this host (says {file.parent})"


def _describe_running_rays() -> str:
    """The Ray clusters with a raylet on this host and a head that listens, for a message; "" if there is none."""
    heads = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or may not be read
            heads |= {word.removeprefix(_HEAD_FLAG) for word in process.cmdline() if word.startswith(_HEAD_FLAG)}
    of_serve = {_port(address) for _, address in find_local_rays(ray_folder())}
    running = [
        f"{address}{' (of a `coatcheck serve`)' if _port(address) in of_serve else ''}"
        for address in sorted(heads)
        if is_listening(address)
    ]
    verb = "runs" if len(running) == 1 else "run"
    return f"; {counted(len(running), 'Ray cluster')} {verb} on this host: {', '.join(running)}" if running else ""


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _connect(address: str) -> None:
    host, port = split_address(address, _EXAMPLE)
    socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_SECONDS).close()


def _check_head(address: str, source: str, own: bool) -> None:
    """Raises Unavailable unless a Ray head is at `address` and accepts our token. Ray's client would retry for
    minutes."""
    token = (read_token(ray_folder(), address) if own else None) or environment_token()
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:  # as Ray's own clients
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise _unavailable(address, source, "something listens there, but does not speak gRPC", own) from None
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        try:
            channel.unary_unary(_CHECK_ALIVE, bytes, bytes)(b"", timeout=_CONNECT_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return  # another version of Ray may not have this call
            fault = "does not accept the token that was sent" if token else "wants its token"
            raise Unavailable(f"the Ray cluster at {address}{source} {fault}: {TOKEN_HELP}") from None


def _unavailable(address: str, source: str, reason: str, own: bool) -> Unavailable:
    remedy = (
        "give another --ray-address, or leave it out to find `coatcheck serve` on this host"
        if own
        else "start one with `ray start --head`, give another --ray-address, or leave it out to start a local Ray"
    )
    return Unavailable(f"no Ray cluster answers at {address}{source}: {reason}; {remedy}")
