"""`coatcheck restart`: groups get new processes one after another, and no request is lost. Knows only the supervisor.

An upgrade is this, once every node has the new version installed.
"""

import sys
import time
from typing import Annotated, Any

import typer

from ..proto.errors import CoatcheckError, Unavailable
from .ray_address import find_ray
from .ray_environment import quiet_driver


def restart(
    groups: Annotated[list[str] | None, typer.Argument(metavar="[GROUP]...", help="Default: all of them.")] = None,
    ray_address: Annotated[str, typer.Option(help="The Ray cluster, HOST:PORT or auto.")] = "auto",
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long what runs on a group may take to end; then it moves to others.")
    ] = 30.0,
) -> None:
    """Start the groups again, one at a time, while the others serve: with whatever version is installed now."""
    try:
        _roll(groups or [], find_ray(ray_address), drain_seconds)
    except CoatcheckError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None


def _roll(groups: list[str], address: str, drain_seconds: float) -> None:
    quiet_driver()
    import ray
    from ray.exceptions import RayError, RayTaskError

    from . import launch

    launch.join(address)
    try:
        supervisor: Any = launch.find_actor(launch.SUPERVISOR)
        if supervisor is None:
            raise Unavailable(f"nothing serves on the Ray cluster at {address}; start it with `coatcheck serve`")
        for group in groups or ray.get(supervisor.config.remote()).group_names:
            began = time.monotonic()
            ray.get(supervisor.restart.remote(group, drain_seconds))
            print(f"{group} serves again after {time.monotonic() - began:.1f} s", flush=True)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CoatcheckError) else Unavailable(str(error)) from None
    except RayError as error:
        raise Unavailable(f"the supervisor was lost: {type(error).__name__}; ask again") from None
    finally:
        ray.shutdown()
