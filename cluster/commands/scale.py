"""`coatcheck scale`: more or fewer groups while they serve, and no request is lost. Knows only the supervisor."""

import time
from typing import Annotated, Any

import typer

from coatcheck.cluster.commands.supervisor_client import RayAddress, supervisor_at
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.rank_placement import NoRoom


def scale(
    groups: Annotated[int, typer.Option(min=1, max=4096, help="How many there are to be.")],
    ray_address: RayAddress = "auto",
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long what runs on a group that goes may take; then it moves to others.")
    ] = 30.0,
) -> None:
    """Have more or fewer groups. The last ones go first; what does not fit is refused, and nothing changes."""
    with supervisor_at(ray_address) as supervisor:
        _scale(supervisor, groups, drain_seconds)


def _scale(supervisor: Any, groups: int, drain_seconds: float) -> None:
    import ray
    from ray.exceptions import RayTaskError

    running, began = ray.get(supervisor.config.remote()), time.monotonic()
    try:
        ray.get(supervisor.scale.remote(groups, drain_seconds))
    except RayTaskError as error:
        if isinstance(error.cause, NoRoom):
            raise error.cause.at_growth(running.groups, groups, own_ray=running.ray_address is None) from None
        raise
    print(f"{counted(groups, 'group')}, before {running.groups}, after {time.monotonic() - began:.1f} s", flush=True)
