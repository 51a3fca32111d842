"""SupervisorCall: how a command reaches the supervisor of a cluster that runs. It does not know what is asked then."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.cluster.ray_cluster.ray_environment import quiet_driver, show_token
from coatcheck.proto.errors import CoatcheckError, Unavailable

RayAddress = Annotated[
    str, typer.Option(help="The Ray cluster, HOST:PORT or auto: the one on this host, by `serve` or Ray.")
]


@contextmanager
def supervisor_at(ray_address: str) -> Iterator[Any]:
    """The supervisor's actor. Whatever Ray raises inside comes out as an error of ours."""
    address = find_ray(ray_address, own=True)
    if ray_address == "auto":
        print(f"on the Ray cluster at {address}", file=sys.stderr, flush=True)
    quiet_driver()
    show_token(address)
    import ray
    from ray.exceptions import RayError, RayTaskError

    from coatcheck.cluster.ray_cluster import launch

    launch.join(address)
    try:
        supervisor = launch.find_actor(launch.SUPERVISOR)
        if supervisor is None:
            raise Unavailable(f"nothing serves on the Ray cluster at {address}; start it with `coatcheck serve`")
        yield supervisor
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CoatcheckError) else Unavailable(str(error)) from None
    except RayError as error:
        raise Unavailable(f"the supervisor was lost: {type(error).__name__}; ask again") from None
    finally:
        ray.shutdown()
