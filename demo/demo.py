"""The main job, as a user would do it: serve a checkpoint, ask it something, ask again, shut it all down.

`coatcheck serve` starts Ray, two worker groups of two tensor-parallel ranks each, and a router; the prompts go to it
over gRPC. The second prompt goes on from the first, so most of its keys and values are found in a cache. The first one
is long enough that this saves time on a busy machine too.
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

HELD_OUT = (Path(__file__).parent / "heldout.txt").read_text()
FIRST = HELD_OUT[: HELD_OUT.index("\n\n", 3_000)]  # about 1,000 tokens
FIRST += '''


class LineReader:
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
        first = await ask(client, "prompt 1 of 3, a long one", FIRST)
        follow_up = FIRST + first.choices[0].text + FOLLOW_UP
        second = await ask(client, "prompt 2 of 3, prompt 1 with its answer and some lines more", follow_up)
        third = await ask(client, "prompt 3 of 3, another text", OTHER)
    return {"prompt 1": first, "prompt 2, from 1": second, "prompt 3": third}


async def ask(client: AsyncClient, label: str, prompt: str) -> GenerationResult:
    """Print the end of the prompt, stream its answer to the terminal, and print what the answer took."""
    console.print(f"[bold]{label}; its end:", soft_wrap=True)
    console.print(Text(f"… {prompt[-160:].rstrip()}", style="dim"), soft_wrap=True)
    console.print("[bold]answer:")
    stream = client.stream(prompt, max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS // 2, temperature=0.6, seed=11)
    async for chunk in stream:
        console.print(chunk.text, end="", markup=False, soft_wrap=True)
    result = stream.result
    console.print(f"\n[bold]took:[/] {cached_tokens(result)} of {result.usage.prompt_tokens} prompt tokens were cached")
    console.print(f"first token after {milliseconds(result)}; {result.routed_by}\n", markup=False, soft_wrap=True)
    return result


def cached_tokens(result: GenerationResult) -> int:
    """Prompt tokens whose keys and values were in a cache."""
    return result.usage.cached_device_tokens + result.usage.cached_host_tokens


def milliseconds(result: GenerationResult) -> str:
    """The TTFT."""
    return f"{(result.ttft or 0) * 1000:.0f} ms"


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
    """Cached tokens, TTFT, speed and group of each answer."""
    table = Table(title="what it took")
    table.add_column("", no_wrap=True)
    for name in ("prompt tokens", "cached", "TTFT", "tokens/s", "group"):
        table.add_column(name, justify="right")
    for name, answer in answers.items():
        speed = (milliseconds(answer), f"{answer.decode_rate or 0:.0f}")
        table.add_row(name, str(answer.usage.prompt_tokens), str(cached_tokens(answer)), *speed, answer.group)
    return table


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
