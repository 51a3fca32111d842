"""Connects a command to the supervisor of a running cluster."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.cluster.ray_cluster.ray_environment import silence_ray_driver, use_local_ray_token
from coatcheck.proto.errors import CoatcheckError, Unavailable

if TYPE_CHECKING:
    from coatcheck.cluster.ray_cluster.actor_handles import SupervisorHandle

RayAddress = Annotated[
    str, typer.Option(help="HOST:PORT of the Ray cluster's head; auto: the Ray cluster on this host.")
]


@contextmanager
def connect_to_supervisor(ray_address: str) -> Iterator["SupervisorHandle"]:
    """The supervisor of the cluster at `ray_address`. Errors of Ray inside the context become CoatcheckErrors."""
    address = find_ray(ray_address, own=True)
    if ray_address == "auto":
        print(f"on the Ray cluster at {address}", file=sys.stderr, flush=True)
    silence_ray_driver()
    use_local_ray_token(address)
    import ray
    from ray.exceptions import RayError, RayTaskError

    from coatcheck.cluster.ray_cluster import launch
    from coatcheck.cluster.ray_cluster.ray_connection import join_ray

    join_ray(address)
    try:
        supervisor = launch.find_supervisor()
        if supervisor is None:
            raise Unavailable(f"nothing serves on the Ray cluster at {address}; start it with `coatcheck serve`")
        yield supervisor
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CoatcheckError) else Unavailable(str(error)) from None
    except RayError as error:
        raise Unavailable(f"the supervisor was lost: {type(error).__name__}; ask again") from None
    finally:
        ray.shutdown()
