"""`coatcheck scale`: adds or removes groups while the cluster serves, without losing a request."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from coatcheck.cluster.commands.supervisor_client import RayAddress, connect_to_supervisor
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources

if TYPE_CHECKING:
    from coatcheck.cluster.ray_cluster.actor_handles import SupervisorHandle


def scale(
    groups: Annotated[int, typer.Option(min=1, max=4096, help="Number of groups (replicas of the model) to have.")],
    ray_address: RayAddress = "auto",
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds that requests on a removed group have to end; then they move to other groups."
        ),
    ] = 30.0,
) -> None:
    """Add or remove groups of a running cluster, the last ones first. If they do not fit, nothing changes."""
    with connect_to_supervisor(ray_address) as supervisor:
        _scale(supervisor, groups, drain_seconds)


def _scale(supervisor: "SupervisorHandle", groups: int, drain_seconds: float) -> None:
    import ray
    from ray.exceptions import RayTaskError

    running, began = ray.get(supervisor.get_config.remote()), time.monotonic()
    try:
        ray.get(supervisor.scale_groups.remote(groups, drain_seconds))
    except RayTaskError as error:
        if isinstance(error.cause, InsufficientResources):
            raise error.cause.for_scale(running.groups, groups, own_ray=running.ray_address is None) from None
        raise
    print(f"{counted(groups, 'group')}, before {running.groups}, after {time.monotonic() - began:.1f} s", flush=True)
