"""`coatcheck serve --apply` on a real Ray: settings change while the cluster serves, and what is impossible is seen."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.ray_head import ENVIRONMENT, ray_head
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving, kill
from tests.cluster.streaming_clients import STREAMS, StreamingClients

_SETTINGS = "groups: 2\ngrpc-port: 0\nkv-memory: 4MiB\n"


@pytest.mark.ray
def test_settings_change_under_streams(tiny_model: Path, tmp_path: Path) -> None:
    """Both groups start again for a smaller pool, then one is removed, and no stream is affected. Another block size is
    refused: `status` says so, readiness goes, and the cluster serves on. A new `serve` finds all of that."""
    file, ready = tmp_path / "serve.yaml", tmp_path / "ready"
    file.write_text(_SETTINGS)
    with ray_head(2) as head, ThreadPoolExecutor(STREAMS + 1) as pool:
        command = [str(tiny_model), "--config", str(file), "--apply", "--ready-file", str(ready)]
        command += ["--ray-address", head.address]
        with Serving(*command, environment=ENVIRONMENT) as serving:
            serving.wait_ready()
            until(ready.exists, "the cluster serves with its settings")
            before = {name: serving.group(name)["ranks"][0]["pid"] for name in ("group-0", "group-1")}
            blocks = serving.group("group-0")["blocks_total"]
            clients = StreamingClients(serving.address, pool)

            file.write_text(_SETTINGS.replace("4MiB", "2MiB"))
            rollout = pool.submit(serving.wait_line, "settings: all are in use")
            streams = clients.ask_while(rollout)
            rollout.result()
            assert all(stream.result() for stream in streams)
            until(ready.exists, "all settings are in use")
            until(lambda: not serving.status()["configuration"], "status has nothing to say")
            for name, pid in before.items():
                group = serving.group(name)
                assert group["blocks_total"] < blocks and group["ranks"][0]["pid"] != pid

            file.write_text(_SETTINGS.replace("4MiB", "2MiB") + "block-size: 32\n")
            assert "block-size from 16 to 32" in serving.wait_line("error: a running cluster cannot change")
            until(lambda: not ready.exists(), "the head is not ready")
            until(lambda: "block-size from 16" in serving.status()["configuration"], "status says it")
            said = coatcheck("status", "--address", serving.address).stdout
            assert "settings: refused: a running cluster cannot change block-size from 16 to 32" in said
            assert serving.generate("def main", max_tokens=4).usage.completion_tokens == 4
            kill(serving.process.pid)
            serving.process.wait()

        file.write_text(_SETTINGS.replace("4MiB", "2MiB").replace("2\ngrpc", "1\ngrpc"))
        with Serving(*command, environment=ENVIRONMENT) as serving:
            serving.wait_ready()
            until(lambda: [group["name"] for group in serving.status()["groups"]] == ["group-0"], "one group is left")
            until(ready.exists, "all settings are in use")
