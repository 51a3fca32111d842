"""The main job, as a user would do it: serve a checkpoint, ask it something, ask again, shut it all down.

`coatcheck serve` starts Ray, two worker groups of two tensor-parallel ranks each, and a router; the prompts go to it
over gRPC. The second prompt goes on from the first, so most of its keys and values are found in a cache.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.errors import CoatcheckError

MODEL = Path(__file__).parent / "model"
GROUPS, RANKS, MAX_TOKENS = 2, 2, 48

FIRST = '''class LineReader:
    """Reads a text file line by line, and remembers where it is.

    The file is opened when the first line is asked for, and closed when the
    last line has been read or when the reader is used as a context manager.
    """

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self.line_number = 0
        self._file = None

    def open(self):
'''
FOLLOW_UP = '''
    def close(self):
        """Close the file, if it is open."""
'''
OTHER = "The asyncio event loop runs tasks and callbacks, performs network IO operations, and"

console = Console(highlight=False)


def main() -> None:
    """Run the demo. On an error, print a line on stderr and exit with 1."""
    began = time.perf_counter()
    port = free_port()
    command = Path(sys.executable).with_name("coatcheck")
    flags = f"--groups {GROUPS} --tp {RANKS} --grpc-port {port} --http-port 0".split()
    console.print(f"[bold]$ coatcheck serve demo/model {' '.join(flags)}")
    server = subprocess.Popen([command, "serve", MODEL, *flags], stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(server)
        console.print(f"serving after {time.perf_counter() - began:.1f} s\n")
        answers = asyncio.run(converse(f"127.0.0.1:{port}"))
    except CoatcheckError as error:
        sys.exit(f"error: {error}")
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    console.print(as_table(answers))
    console.print(f"shut down with exit code {code}; {time.perf_counter() - began:.1f} s in all")
    sys.exit(code)


async def converse(address: str) -> dict[str, GenerationResult]:
    """Three prompts: the second goes on from the first and its answer, the third has nothing to do with them."""
    async with AsyncClient([address]) as client:
        first = await ask(client, FIRST)
        second = await ask(client, FIRST + first.choices[0].text + FOLLOW_UP)
        third = await ask(client, OTHER)
    return {"a prompt": first, "its follow-up": second, "another": third}


async def ask(client: AsyncClient, prompt: str) -> GenerationResult:
    """Stream one answer to the terminal, after the end of its prompt in grey."""
    console.print(Text(f"… {prompt[-160:]}", style="dim"), end="", soft_wrap=True)
    stream = client.stream(prompt, max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS // 2, temperature=0.6, seed=11)
    async for chunk in stream:
        console.print(chunk.text, end="", markup=False, soft_wrap=True)
    console.print(f"\n\n[dim]why {stream.result.routed_by}\n", soft_wrap=True)
    return stream.result


def wait_until_ready(server: "subprocess.Popen[str]") -> None:
    """Print the server's stderr until it is ready. A thread prints later lines."""
    assert server.stderr is not None
    for line in server.stderr:
        console.print(line, end="", markup=False, soft_wrap=True)
        if line.startswith("ready: "):
            threading.Thread(target=show, args=[server.stderr], daemon=True).start()
            return
    raise CoatcheckError(f"coatcheck serve ended with exit code {server.wait()}")


def show(lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, end="", markup=False, soft_wrap=True)


def as_table(answers: dict[str, GenerationResult]) -> Table:
    """Cached tokens, group and speed of each answer."""
    table = Table(title="what it took")
    table.add_column("", no_wrap=True)
    for name in ("prompt tokens", "cached on device", "in host memory", "group", "TTFT", "tokens/s"):
        table.add_column(name, justify="right")
    for name, answer in answers.items():
        usage, group = answer.usage, answer.group
        cached = (str(usage.cached_device_tokens), str(usage.cached_host_tokens))
        speed = (f"{(answer.ttft or 0) * 1000:.0f} ms", f"{answer.decode_rate or 0:.0f}")
        table.add_row(name, str(usage.prompt_tokens), *cached, group, *speed)
    return table


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
