"""Browser: headless chromium, controlled over its DevTools protocol."""

import asyncio
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.programs.find import need_program

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def _noted_port(file: Path) -> tuple[str, str]:
    """The port and the path where chromium listens, from the file to which it writes them."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while True:
        lines = file.read_text().split("\n") if file.exists() else []
        if len(lines) == 2:
            return lines[0], lines[1]
        assert time.monotonic() < deadline, f"chromium has not started within {MAX_WAIT_SECONDS:g} s"
        time.sleep(0.05)


class Browser:
    """One page in one browser; an async context manager that owns the process. `requests`: the URLs that the page has
    requested. `complaints`: console messages at warning or above, including violations of the content security
    policy."""

    def __init__(self, *arguments: str) -> None:
        self._more = arguments
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self._loaded = asyncio.Event()

    async def __aenter__(self) -> Self:
        chromium = need_program(*CHROMIUM_NAMES)
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--mute-audio"]
        arguments += ["--remote-debugging-port=0", f"--user-data-dir={self._home.name}", *self._more]
        environment = {**os.environ, "HOME": self._home.name}
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            chromium, *arguments, "about:blank", stdout=quiet, stderr=quiet, env=environment
        )
        try:
            # It writes the port and the path when it listens.
            port, path = await asyncio.to_thread(_noted_port, Path(self._home.name, "DevToolsActivePort"))
            self._socket: ClientConnection = await connect(f"ws://127.0.0.1:{port}{path}", max_size=1 << 26)
            self._reader = asyncio.create_task(self._read())
            target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
            self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                await self.call(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            await self._process.wait()
            self._home.cleanup()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()
        self._process.kill()
        await self._process.wait()
        self._home.cleanup()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the protocol; returns its result."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send(json.dumps({**message, "sessionId": self._session} if self._session else message))
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            answer = await self._answers[number]
        del self._answers[number]
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Loads a page."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            await self._loaded.wait()

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, its result."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def see(self, expression: str, wanted: Any) -> None:
        """Waits until the JavaScript expression has the value `wanted`."""
        # The page itself looks, at each of its frames and at least so often.
        looks = (
            f"new Promise((done) => {{ const until = Date.now() + {MAX_WAIT_SECONDS * 800:.0f}; const look = () => {{"
            f"let now; try {{ now = {expression} }} catch (error) {{ now = String(error) }}"
            f"if (now === {json.dumps(wanted)} || Date.now() > until) done(now); "
            "else setTimeout(look, 30) }; look() })"
        )
        seen = await self.run(looks)
        assert seen == wanted, f"{expression} is {seen!r}, not {wanted!r}; console: {self.complaints}"

    async def _read(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                if message["id"] in self._answers:
                    self._answers[message["id"]].set_result(message)
                continue
            said = message["params"]
            match message["method"]:
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Network.requestWillBeSent":
                    self.requests.append(said["request"]["url"])
                case "Log.entryAdded" if said["entry"]["level"] in ("warning", "error"):
                    self.complaints.append(said["entry"]["text"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(said["exceptionDetails"]["text"])
