"""`coatcheck restart`: everything gets new processes, one after another, and no request is lost. Knows the supervisor.

An upgrade is this, once every node has the new version installed.
"""

import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from coatcheck.cluster.commands.supervisor_client import RayAddress, supervisor_at

_ADOPT_SECONDS = 30.0
_POLL_SECONDS = 0.1


def restart(
    groups: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP]...", help="Default: the supervisor, then every group.")
    ] = None,
    ray_address: RayAddress = "auto",
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long what runs on a group may take to end; then it moves to others.")
    ] = 30.0,
    routers: Annotated[
        bool, typer.Option("--routers", help="Then the routers too: each takes no new request while what runs ends.")
    ] = False,
) -> None:
    """Start the groups again, one at a time, while the others serve: with whatever version is installed now."""
    with supervisor_at(ray_address) as supervisor:
        _roll(supervisor, groups or [], drain_seconds, routers=routers)


def _roll(supervisor: Any, groups: list[str], drain_seconds: float, *, routers: bool) -> None:
    import ray

    if not groups:
        # First, since it tells the others what to be: an older one could not tell newer groups all of it.
        began = time.monotonic()
        _renew(supervisor)
        _say("the supervisor", began)
        groups = ray.get(supervisor.config.remote()).group_names
    for group in groups:
        began = time.monotonic()
        ray.get(supervisor.restart.remote(group, drain_seconds))
        _say(group, began)
    for address in ray.get(supervisor.state.remote()).routers if routers else ():
        began = time.monotonic()
        ray.get(supervisor.restart_router.remote(address, drain_seconds))
        _say(f"the router at {address}", began)


def _renew(supervisor: Any) -> None:
    """Returns once the next one has adopted everything, or has had its time: what is wrong then is said of a group."""
    import ray
    from ray.exceptions import RayError

    with suppress(RayError):  # it has ended
        ray.get(supervisor.restart_supervisor.remote())
    deadline = time.monotonic() + _ADOPT_SECONDS
    while time.monotonic() < deadline:
        with suppress(RayError):  # the next one is not there yet
            if ray.get(supervisor.state.remote(), timeout=_ADOPT_SECONDS).is_ready:
                return
        time.sleep(_POLL_SECONDS)


def _say(what: str, began: float) -> None:
    print(f"{what} serves again after {time.monotonic() - began:.1f} s", flush=True)
