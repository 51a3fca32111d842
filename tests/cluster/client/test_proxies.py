"""Proxy variables and calls within a host or a cluster."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.proto.internal_tls import internal_channel


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_calls_to_this_host_take_no_proxy(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """With a proxy in the environment that nobody runs, a router reaches a group and a client a router on this host."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    alone = [("grpc.use_local_subchannel_pool", 1)]
    try:
        for channel in (
            internal_channel(f"127.0.0.1:{port}", None, alone),
            Credentials().channel(f"127.0.0.1:{port}", alone),
            Credentials().channel(f"localhost:{port}", alone),
            Credentials().channel(f"127.1.2.3:{port}", alone),
        ):
            async with channel:
                await asyncio.wait_for(channel.channel_ready(), MAX_WAIT_SECONDS)
        with Credentials().blocking_channel(f"127.0.0.1:{port}") as blocking:
            grpc.channel_ready_future(blocking).result(MAX_WAIT_SECONDS)
    finally:
        await server.stop(None)
