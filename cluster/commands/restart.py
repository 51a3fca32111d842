"""`coatcheck restart`: replaces the processes of a running cluster one group at a time, without losing a request.

To upgrade, install the new version on every node, then run this command.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from coatcheck.cluster.commands.supervisor_client import RayAddress, connect_to_supervisor
from coatcheck.proto.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from coatcheck.cluster.ray_cluster.actor_handles import SupervisorHandle

_ADOPT_SECONDS = 30.0
_POLL_SECONDS = 0.1


def restart(
    groups: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP]...", help="Default: the supervisor, then every group.")
    ] = None,
    ray_address: RayAddress = "auto",
    drain_seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that requests on a group have to end; then they move to other groups."),
    ] = 30.0,
    routers: Annotated[
        bool,
        typer.Option("--routers", help="Restart the routers afterwards; each refuses new requests while its own end."),
    ] = False,
) -> None:
    """Rolling restart: restart one group at a time while the others serve, with the version that is installed now."""
    with connect_to_supervisor(ray_address) as supervisor:
        _restart_groups(supervisor, groups or [], drain_seconds, routers=routers)


def _restart_groups(supervisor: "SupervisorHandle", groups: list[str], drain_seconds: float, *, routers: bool) -> None:
    import ray

    restarts_all = not groups
    if restarts_all:
        # First, because the supervisor sends the groups their settings, and an older supervisor would omit new ones.
        began = time.monotonic()
        _restart_supervisor(supervisor)
        _print_duration("the supervisor", began)
        groups = ray.get(supervisor.get_config.remote()).group_names
    for group in groups:
        began = time.monotonic()
        try:
            ray.get(supervisor.restart_group.remote(group, drain_seconds))
        except NotFound:
            if not restarts_all:
                raise
            print(f"{group} was removed meanwhile", flush=True)  # by the autoscaler, or by `coatcheck scale`
            continue
        _print_duration(group, began)
    for address in _find_routers(supervisor) if routers else ():
        began = time.monotonic()
        ray.get(supervisor.restart_router.remote(address, drain_seconds))
        _print_duration(f"the router at {address}", began)


def _find_routers(supervisor: "SupervisorHandle") -> tuple[str, ...]:
    """The gRPC address of each router, once all serve. Raises Unavailable if one does not serve within 30 s."""
    import ray

    deadline = time.monotonic() + _ADOPT_SECONDS
    while not (addresses := ray.get(supervisor.get_state.remote()).grpc_addresses):
        if time.monotonic() > deadline:
            raise Unavailable(
                "no router was restarted, because one does not serve; find it with `coatcheck status`, and restart the "
                "routers again once all serve"
            )
        time.sleep(_POLL_SECONDS)
    return addresses


def _restart_supervisor(supervisor: "SupervisorHandle") -> None:
    """Return once the new supervisor has adopted all processes, or after 30 s. If it still fails then, the restart of
    the first group reports the error."""
    import ray
    from ray.exceptions import RayError

    with suppress(RayError):  # the process ends without an answer
        ray.get(supervisor.restart_supervisor.remote())
    deadline = time.monotonic() + _ADOPT_SECONDS
    while time.monotonic() < deadline:
        with suppress(RayError):  # the new supervisor has not started yet
            if ray.get(supervisor.get_state.remote(), timeout=_ADOPT_SECONDS).is_ready:
                return
        time.sleep(_POLL_SECONDS)


def _print_duration(what: str, began: float) -> None:
    print(f"{what} serves again after {time.monotonic() - began:.1f} s", flush=True)
