"""Connects this process to Ray, and reads the address, folders and state of its node. Importing it imports Ray."""

import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.local_ray import temporary_folder
from coatcheck.cluster.ray_cluster.ray_environment import TOKEN_HELP
from coatcheck.cluster.ray_cluster.ray_start import RayNotReady
from coatcheck.proto.errors import InvalidConfig, Unavailable

NAMESPACE: Final = "coatcheck"

# The smallest that Ray accepts: neither tensors nor tokens pass through Ray's object store.
_OBJECT_STORE_BYTES: Final = 80 << 20
_POLL_SECONDS: Final = 0.02
_FREQUENT_POLL_SECONDS: Final = 30.0  # as long as Ray itself waits for the raylet of an idle machine
_INIT_OPTIONS: Final[dict[str, Any]] = dict(namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


class _NoPaths(list[str]):
    """A list that Ray cannot extend."""

    def extend(self, paths: Iterable[str]) -> None:
        pass


def connect_to_ray(config: ServeConfig) -> None:
    """Connect to the cluster at `ray_address`, or start a local Ray that ends with this process. Makes one attempt.

    Raises RayNotReady if another attempt may succeed, Unavailable or InvalidConfig if none will.
    """
    if config.ray_address:
        join_ray(config.ray_address)
    else:
        _start_local_ray(config)


def join_ray(address: str) -> None:
    """Connect to the existing cluster at `address`.

    Raises RayNotReady (an Unavailable) if no head answers within Ray's time limit, Unavailable if the cluster wants
    another token, and InvalidConfig if the cluster runs another version of Ray or Python.
    """
    try:
        ray.init(address=address, job_config=_make_job_config(), **_INIT_OPTIONS)
    except Exception as error:  # Ray raises plain Exception for some failures
        if isinstance(error, AuthenticationError):
            raise Unavailable(f"the Ray cluster at {address} wants its token: {TOKEN_HELP}") from None
        if "ersion mismatch" in str(error):
            versions = " ".join(str(error).split())
            raise InvalidConfig(f"{versions}; install the same versions of Ray and Python on every node") from None
        what = f"no Ray cluster answers at {address}"
        if isinstance(error, ValueError | TypeError):
            raise Unavailable(f"{what}: {_first_line(error)}") from None
        raise RayNotReady(what, _first_line(error)) from None


def _start_local_ray(config: ServeConfig) -> None:
    _skip_helpers()
    try:
        with _poll_raylet_often():
            ray.init(
                address="local",
                # A rank on a CPU takes one logical CPU of Ray. Ray gets enough of them even if the host has fewer
                # cores.
                num_cpus=max((config.max_groups or config.groups) * config.tp, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _plasma_directory=_object_store_folder(),
                job_config=_make_job_config(),
                **_INIT_OPTIONS,
            )
    except (ValueError, TypeError, PermissionError) as error:
        raise Unavailable(f"Ray did not start: {_first_line(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            raise Unavailable(f"Ray did not start: {_first_line(error)}; make room there, or set RAY_TMPDIR") from None
        raise RayNotReady("Ray did not start", _first_line(error)) from None
    except Exception as error:  # Ray raises plain Exception if a process starts too late
        raise RayNotReady("Ray did not start", _first_line(error)) from None


def _make_job_config() -> JobConfig:
    """A job config without module paths. Ray would put the current directory first on each actor's module path. A file
    there with the name of a module, such as copy.py, would be imported in its place."""
    config = JobConfig()
    config._py_driver_sys_path = _NoPaths()  # Ray has no setting for this
    return config


def _object_store_folder() -> str | None:
    """The folder of Ray's object store; None for Ray's choice, /dev/shm.

    If /dev/shm has too little space, as in most containers, Ray would use a disk and warn that it is slow. The speed
    does not matter, because Coatcheck does not use the store.
    """
    try:
        memory = os.statvfs("/dev/shm")
    except OSError:
        return None
    return None if memory.f_bavail * memory.f_frsize >= _OBJECT_STORE_BYTES else str(temporary_folder())


def _skip_helpers() -> None:
    """Make Ray start no process that a local Ray does not need: neither the dashboard's server nor the log monitor nor
    the autoscaler's monitor. ray.init would wait for the dashboard's server before it starts the raylet."""
    from ray._private.node import Node  # ray.init has no arguments for this

    for name in ("start_api_server", "start_log_monitor", "start_monitor"):
        if hasattr(Node, name):
            setattr(Node, name, lambda node, **arguments: None)


@contextmanager
def _poll_raylet_often() -> Iterator[None]:
    """While inside, ray.init notices within 20 ms that the raylet has registered. Ray itself looks once a second."""
    from ray._private import services  # ray.init has no argument for this
    from ray._private.state import GlobalState

    private: Any = services
    get_node = private.get_node

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        state: Any = GlobalState()  # type: ignore[no-untyped-call]
        state._initialize_global_state(private._get_gcs_client_options(gcs_address))
        deadline = time.monotonic() + _FREQUENT_POLL_SECONDS
        while time.monotonic() < deadline and all(node["NodeID"] != node_id for node in state.node_table()):
            time.sleep(_POLL_SECONDS)
        return get_node(gcs_address, node_id)  # waits on if the node has not registered

    private.get_node = wait_for_node
    try:
        yield
    finally:
        private.get_node = get_node


def head_address() -> str:
    """HOST:PORT of the head (its GCS) that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def node_id() -> str:
    """The id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def log_folder() -> Path:
    """The folder of the logs of Ray's processes on this node."""
    return Path(_ray_node().get_logs_dir_path())


def is_raylet_listening() -> bool:
    """Whether this node's raylet still accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(_ray_node().raylet_socket_name) == 0


def _ray_node() -> Any:
    from ray._private.worker import global_worker  # Ray has no public call for this

    return global_worker.node


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
