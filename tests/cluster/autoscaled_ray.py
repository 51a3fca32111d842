"""AutoscaledRay: a Ray cluster on this machine whose autoscaler adds and removes nodes.

The autoscaler is Ray's own. Ray's node provider for tests starts a raylet where a cloud's provider starts a machine.
(Ray's own wrapper for it begins with `ray stop`, which would end every Ray of this machine.)
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, Self

from coatcheck.bench.setup.ray_nodes import ENVIRONMENT, listens
from coatcheck.bench.setup.servers import free_port
from coatcheck.cluster.ray_cluster.process_tree import descendants
from tests.cluster.running_server import until

_HEAD: Final = "f" * 51 + "00000"  # the id that the provider gives the head


class AutoscaledRay:
    """A context manager: a head with `head_cpus` logical CPUs, and up to `most` nodes with one each."""

    def __init__(self, scratch: Path, *, head_cpus: int, most: int) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.environment = {**ENVIRONMENT, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._log = scratch / "autoscaled-ray.log"
        # A node is removed after it was idle for two seconds.
        config = {
            "cluster_name": "here",
            "max_workers": most,
            "idle_timeout_minutes": 2 / 60,
            "provider": {
                "type": "external",  # under its own name its wheel lacks a file of defaults
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self.address,
                "head_node_id": _HEAD,
                "launch_multiple": True,
                "disable_node_updaters": True,  # nothing is to be installed on them
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
                "worker": {
                    "resources": {"CPU": 1, "object_store_memory": 80 << 20},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": most,
                },
            },
            "head_node_type": "ray.head.default",
            "auth": {},
            "docker": {},
            "file_mounts": {},
            **{f"{where}setup_commands": [] for where in ("", "head_", "worker_")},
            **{f"{where}_start_ray_commands": [] for where in ("head", "worker")},
            "initialization_commands": [],
            "cluster_synced_files": [],
            "upscaling_speed": 1.0,
        }
        file = scratch / "autoscaling.json"
        file.write_text(json.dumps(config))
        flags = [f"--port={port}", f"--num-cpus={head_cpus}", f"--temp-dir={self._folder}"]
        flags += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--autoscaling-config={file}"]
        flags += ["--object-store-memory=83886080", f"--dashboard-agent-listen-port={free_port()}"]
        self._command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *flags]

    def __enter__(self) -> Self:
        autoscaler = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self.environment, **autoscaler},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(lambda: listens(self.address), "the Ray head listens")
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def nodes(self) -> int:
        """The number of raylets that run: the head's, and one for each added node."""
        return sum("/raylet/raylet " in command for command in descendants(self._process.pid).values())

    def last_words(self, actor: str, lines: int = 12) -> str:
        """The last `lines` log lines of each actor of class `actor`."""
        logs = Path(self._folder, "session_latest", "logs").glob("worker-*.err")
        texts = [text for log in logs if f":actor_name:{actor}\n" in (text := log.read_text())]
        return "".join(f"\n{line}" for text in texts for line in text.splitlines()[-lines:])
