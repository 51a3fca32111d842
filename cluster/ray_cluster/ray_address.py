"""RayAddress: which Ray cluster `--ray-address` means, and whether anything listens there.

Ray would answer both, but after a minute or never: `auto` may name a cluster that has ended long ago. It does not
import Ray.
"""

import os
import socket
from contextlib import suppress

import grpc

from coatcheck.cluster.config.address import split_address
from coatcheck.cluster.ray_cluster.local_ray import own_rays, ray_folder, token_of
from coatcheck.cluster.ray_cluster.ray_environment import TOKEN_HELP, enable_user_token, environment_token
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.workers.host.safe_files import read_file

_ANSWER_SECONDS = 5.0
_MOST_BYTES = 4096
_EXAMPLE = "127.0.0.1:6379"
_ASK = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # an empty question will do


def find_ray(written: str, *, own: bool = False) -> str:
    """HOST:PORT of a cluster whose head listens; raises InvalidConfig or Unavailable with what to do.

    `own`: it is to be one where something serves already, and `auto` may mean a Ray that `coatcheck serve` has started
    for itself; where several listen, the person must choose, since the last one need not be theirs.
    """
    address, source = _resolve(written, own)
    if written == "auto" and address != os.environ.get("RAY_ADDRESS"):
        enable_user_token()
    try:
        _connect(address)
    except OSError as error:
        raise _no_ray(address, source, error.strerror or str(error), own) from None
    # Ray's head speaks gRPC; towards anything else Ray itself would try for minutes.
    if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
        _greet(address, source, own)
    return address


def _connect(address: str) -> None:
    host, port = split_address(address, _EXAMPLE)
    socket.create_connection((host.strip("[]"), port), timeout=_ANSWER_SECONDS).close()


def _greet(address: str, source: str, own: bool) -> None:
    """Raises Unavailable unless a Ray is there and lets us in: it would let nobody know for minutes."""
    token = (token_of(ray_folder(), address) if own else None) or environment_token()
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            raise _no_ray(address, source, "something listens there, but does not speak gRPC", own) from None
        shown = (("authorization", f"Bearer {token}"),) if token else None
        try:
            channel.unary_unary(_ASK, bytes, bytes)(b"", timeout=_ANSWER_SECONDS, metadata=shown)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return  # it need not know this question
            fault = "does not accept the token that was sent" if token else "wants its token"
            raise Unavailable(f"the Ray cluster at {address}{source} {fault}: {TOKEN_HELP}") from None


def _no_ray(address: str, source: str, reason: str, own: bool) -> Unavailable:
    other = (
        "give another --ray-address, or leave it out for what serves on this host"
        if own
        else "start one with `ray start --head`, give another --ray-address, or leave it out for a Ray of our own"
    )
    return Unavailable(f"no Ray cluster answers at {address}{source}: {reason}; {other}")


def _resolve(written: str, own: bool) -> tuple[str, str]:
    """(address, where it comes from, in words)."""
    if written != "auto":
        return written, ""
    # In Ray's own order, but for its last resort: any Ray that it finds among this host's processes.
    if (named := os.environ.get("RAY_ADDRESS", "auto")) not in ("", "auto"):
        return named, ", which RAY_ADDRESS names"
    file = ray_folder() / "ray_current_cluster"
    started: list[tuple[int, str]] = own_rays(ray_folder()) if own else []
    started = [(when, address) for when, address in started if listens(address)]
    with suppress(OSError):
        started.append((file.stat().st_mtime_ns, read_file(file, _MOST_BYTES).strip()))
    # By port, because Ray may have recorded one of them under another address of this host.
    ports = {address.rpartition(":")[2]: address for _, address in reversed(started) if own and listens(address)}
    if len(ports) > 1:
        raise InvalidConfig(
            f"{len(ports)} Ray clusters run on this host: {', '.join(sorted(ports.values()))}; say which with "
            "--ray-address (`coatcheck serve` says its own as it starts)"
        )
    if not started:
        other = " and no `coatcheck serve` of this user with a Ray of its own" if own else ""
        raise InvalidConfig(
            f"--ray-address auto finds no Ray cluster on this host{other} (RAY_ADDRESS is not set, and there is no "
            f"{file}); start one with `{'coatcheck serve' if own else 'ray start --head'}`, or give HOST:PORT"
        )
    return max(started)[1], f", the last one started on this host (says {file.parent})"


def listens(address: str) -> bool:
    """Whether anything accepts connections at HOST:PORT."""
    with suppress(OSError, InvalidConfig):
        _connect(address)
        return True
    return False
