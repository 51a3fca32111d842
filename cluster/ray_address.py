"""RayAddress: which Ray cluster `--ray-address` means, and whether anything listens there.

Ray would answer both, but after a minute or never: `auto` may name a cluster that has ended long ago. It does not
import Ray.
"""

import os
import socket
from pathlib import Path

import grpc

from ..proto.errors import InvalidConfig, Unavailable
from .address import split_address

_ANSWER_SECONDS = 5.0
_EXAMPLE = "127.0.0.1:6379"


def find_ray(written: str) -> str:
    """HOST:PORT of a cluster whose head listens; raises InvalidConfig or Unavailable with what to do."""
    address, source = _resolve(written)
    host, port = split_address(address, _EXAMPLE)
    try:
        socket.create_connection((host.strip("[]"), port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise _no_ray(address, source, error.strerror or str(error)) from None
    # Ray's head speaks gRPC; towards anything else Ray itself would try for minutes.
    if os.environ.get("RAY_USE_TLS", "0") in ("", "0") and not _speaks_grpc(address):
        raise _no_ray(address, source, "something listens there, but does not speak gRPC")
    return address


def _speaks_grpc(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            return False
    return True


def _no_ray(address: str, source: str, reason: str) -> Unavailable:
    return Unavailable(
        f"no Ray cluster answers at {address}{source}: {reason}; start one with `ray start --head`, "
        "give another --ray-address, or leave it out for a Ray of our own"
    )


def _resolve(written: str) -> tuple[str, str]:
    """(address, where it comes from, in words)."""
    if written != "auto":
        return written, ""
    # In Ray's own order, but for its last resort: any Ray that it finds among this host's processes.
    if (named := os.environ.get("RAY_ADDRESS", "auto")) not in ("", "auto"):
        return named, ", which RAY_ADDRESS names"
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        return file.read_text().strip(), f", the last one started on this host (says {file})"
    except OSError:
        raise InvalidConfig(
            f"--ray-address auto finds no Ray cluster on this host (RAY_ADDRESS is not set, and there is no {file}); "
            "start one with `ray start --head`, or give HOST:PORT"
        ) from None
