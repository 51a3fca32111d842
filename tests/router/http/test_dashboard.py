"""The web page on the router, in a real browser."""

import base64
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, RankStatus
from coatcheck.proto.stubs.worker_pb2 import FromGroup, Load
from coatcheck.router.access.key_file import hash_key
from tests.router.fake_group import FakeGroup
from tests.router.http.browser import Browser
from tests.router.http_router import StartHttpRouter

PAGE = Path(__file__).parents[3] / "router" / "http" / "page"
STATUS = GroupStatus(
    running=2,
    waiting=3,
    blocks_used=16,
    blocks_cached=32,
    blocks_total=64,
    host_blocks_total=10,
    host_blocks_used=5,
    prompt_tokens=200,
    cached_device_tokens=100,
    generated_tokens=1000,
    step_seconds=0.012,
    uptime_seconds=7300,
    ranks=[RankStatus(rank=rank, healthy=rank == 0, node="node-a", pid=7, steps=12) for rank in range(2)],
)
CARD = "document.querySelector('#cards [data-key=g0]')"


def test_the_page_is_small_and_self_contained() -> None:
    """All files of the page together are under 200 KB, and none names another host."""
    files = [file for file in PAGE.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 200_000 and len(files) == 4
    for file in files:
        foreign = set(re.findall(r"https?://[^\s\"')`]+", file.read_text())) - {"http://www.w3.org/2000/svg"}
        assert foreign == set(), file


async def test_a_browser_shows_the_cluster_as_it_moves(start_http_router: StartHttpRouter) -> None:
    """Groups, ranks, blocks by tier, hit ratio, queue and latency are shown and follow the next report. The console has
    no warning, nothing is loaded from other hosts, and the two themes differ."""
    group = FakeGroup()
    group.load = Load(status=STATUS)
    router = await start_http_router(group)
    await router.openai.completions.create(model="tiny", prompt="a fox", max_tokens=4)
    async with Browser() as browser:
        await browser.open(f"http://{router.http_address}/")
        await browser.see("document.querySelector('#state').textContent", "serving")
        await browser.see(f"{CARD}.querySelectorAll('.ranks li').length", 2)
        assert await browser.run(f"[...{CARD}.querySelectorAll('.ranks li')].map((rank) => rank.className)") == [
            "",
            "ill",
        ]
        for tier, said in (("device", "16 in use, 32 cached, of 64"), ("host", "5 cached, of 10")):
            bar = f"{CARD}.querySelector('[data-key=tier-{tier}] .bar')"
            assert await browser.run(f"{bar}.getAttribute('aria-label')") == f"{tier} blocks: {said}"
        share = "(bar) => Math.round(100 * bar.querySelector('.used').offsetWidth / bar.offsetWidth)"
        assert await browser.run(f"({share})({CARD}.querySelector('.bar'))") == 25
        tile = "document.querySelector('[data-key=\"{}\"] dd span').textContent"
        assert await browser.run(tile.format("Queue")) == "3" and await browser.run(tile.format("Running")) == "2"
        assert await browser.run(f"[...{CARD}.querySelectorAll('dd')].map((fact) => fact.textContent)") == [
            "2",
            "3",
            "50.0%",
            "12.0 ms",
            "2 h",
            "0",
        ]
        assert await browser.run("document.querySelector('[data-key=ttft]').children[4].textContent") == "1"
        # As they move.
        later = GroupStatus()
        later.CopyFrom(STATUS)
        later.waiting, later.blocks_used, later.generated_tokens = 9, 32, 2000
        group.send(FromGroup(load=Load(status=later)))
        await browser.see(tile.format("Queue"), "9")
        await browser.see(f"({share})({CARD}.querySelector('.bar'))", 50)
        await browser.see("Number(document.querySelector('[data-key=\"Tokens a second\"] path.line')"
                          ".getAttribute('d').split('L').length) > 1", True)  # fmt: skip
        # Dark and light.
        papers = []
        for theme in ("light", "dark"):
            await browser.run("document.querySelector('#theme').click()")
            assert await browser.run("document.documentElement.dataset.theme") == theme
            papers.append(await browser.run("getComputedStyle(document.body).backgroundColor"))
        assert papers[0] != papers[1]
        assert {urlsplit(url).netloc for url in browser.requests} == {router.http_address}
        assert browser.complaints == []


async def test_the_policy_holds_in_the_browser(start_http_router: StartHttpRouter) -> None:
    """The browser refuses an injected script and a request to another host."""
    router = await start_http_router(FakeGroup())
    async with Browser() as browser:
        await browser.open(f"http://{router.http_address}/dashboard")
        await browser.see("document.querySelector('#state').textContent", "serving")
        await browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'stolen = 1'}))")
        assert await browser.run("typeof stolen") == "undefined"
        refused = "fetch('http://127.0.0.2:1/').then(() => 'let through', (error) => error.message)"
        assert await browser.run(refused) == "Failed to fetch"
        said = "".join(browser.complaints)
        assert "inline script violates" in said and "Connecting to 'http://127.0.0.2:1/' violates" in said


async def test_what_assistive_technology_finds(start_http_router: StartHttpRouter) -> None:
    """Every picture, button and region of the page has a name in the browser's accessibility tree."""
    group = FakeGroup()
    group.load = Load(status=STATUS)
    router = await start_http_router(group)
    async with Browser() as browser:
        await browser.open(f"http://{router.http_address}/")
        await browser.see(f"{CARD}.querySelectorAll('.ranks li').length", 2)
        nodes = (await browser.call("Accessibility.getFullAXTree"))["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]
        ]
        needing = ("image", "button", "region", "article", "link", "table", "columnheader", "rowheader")
        assert [node for node in named if node[0] in needing[:5] + needing[6:] and not node[1]] == []
        roles = {role for role, _ in named}
        assert {"banner", "main", "heading", "table", "article", "status", "button"} <= roles
        headings = [name for role, name in named if role == "heading"]
        assert [name.lower() for name in headings[:4]] == [
            "coatcheck router-0",
            "now",
            "latency, last five minutes",
            "groups",
        ]


# The least contrast of any text with what lies behind it, as the guidelines for accessible pages compute it.
CONTRAST = """(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour !== "rgba(0, 0, 0, 0)" ? colour : behind(node.parentElement);
  };
  const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  const ratios = [...document.body.querySelectorAll("*")].filter(own).map((node) => {
    const [dim, bright] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => a - b);
    return (bright + 0.05) / (dim + 0.05);
  });
  return [ratios.length > 30, Math.min(...ratios)];
})()"""


async def test_everybody_can_read_it(start_http_router: StartHttpRouter) -> None:
    """In both themes each text has enough contrast, on a telephone nothing is cut off, and the keyboard reaches every
    control and shows the focus."""
    group = FakeGroup()
    group.load = Load(status=STATUS)
    router = await start_http_router(group)
    async with Browser() as browser:
        metrics = {"deviceScaleFactor": 1, "mobile": True}
        await browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, **metrics)
        await browser.open(f"http://{router.http_address}/")
        await browser.see(f"{CARD}.querySelectorAll('.ranks li').length", 2)
        for theme in ("light", "dark"):
            await browser.run("document.querySelector('#theme').click()")
            enough, least = await browser.run(CONTRAST)
            assert enough and least >= 4.5, (theme, least)
        for narrow in ("document.documentElement", "document.querySelector('.scroll')"):
            assert await browser.run(f"{narrow}.scrollWidth - {narrow}.clientWidth") == 0, narrow
        reached = []
        for _ in range(4):
            for kind in ("keyDown", "keyUp"):
                await browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", windowsVirtualKeyCode=9)
            style = "getComputedStyle(document.activeElement).outlineStyle"
            reached.append(
                await browser.run(f"[document.activeElement.className || document.activeElement.id, {style}]")
            )
        assert reached == [["skip", "solid"], ["theme", "solid"], ["scroll", "solid"], ["", "solid"]]


async def test_a_group_that_is_lost_is_said(start_http_router: StartHttpRouter) -> None:
    """The card of a lost group shows its new state, and so does the state of the router."""
    group = FakeGroup()
    router = await start_http_router(group)
    async with Browser() as browser:
        await browser.open(f"http://{router.http_address}/")
        await browser.see(f"{CARD} && {CARD}.querySelector('.badge').textContent", "serving")
        await group.kill()
        await browser.see(f"{CARD}.querySelector('.badge').textContent", "lost")
        await browser.see("document.querySelector('#state').textContent", "unavailable")
        assert "unavailable" in await browser.run("document.title")


async def test_the_page_is_shown_behind_a_prefix(start_http_router: StartHttpRouter) -> None:
    """The page loads its files and its state from paths with the prefix of a proxy that it was loaded with."""
    router = await start_http_router(FakeGroup(), root_path="/llm")
    async with Browser() as browser:
        for path in ("/llm/", "/llm/dashboard", "/dashboard"):
            await browser.open(f"http://{router.http_address}{path}")
            await browser.see("document.querySelector('#state').textContent", "serving")
            prefix = path.removesuffix("/").removesuffix("/dashboard")
            entries = "performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)"
            loaded = await browser.run(entries)
            assert f"{prefix}/dashboard/state" in loaded and all(one.startswith(f"{prefix}/") for one in loaded), loaded


async def test_what_is_wrong_is_said(start_http_router: StartHttpRouter) -> None:
    """How requests ended, the settings that are refused, and requests that wait in the router itself."""
    group = FakeGroup()
    router = await start_http_router(group)
    await router.openai.completions.create(model="tiny", prompt="a fox", max_tokens=4)
    router.server.set_configuration("refused: a running cluster cannot change tp")
    async with Browser() as browser:
        await browser.open(f"http://{router.http_address}/")
        settings = "document.querySelector('#settings')"
        await browser.see(f"{settings}.textContent", "Settings: refused: a running cluster cannot change tp")
        outcomes = "document.querySelector('#outcomes').textContent"
        await browser.see(outcomes, "1 of 1 groups serve. Requests of the last five minutes: 1 ok.")
        router.server.set_configuration("")
        await browser.see(f"{settings}.hidden", True)
        waits = "{...previous, queued: 70, queue_seconds: 3.25, waiting: 2}"
        queue = "document.querySelector('[data-key=Queue] dd').textContent"
        assert await browser.run(f"(show({waits}), {queue})") == "72waiting, for up to 3.25 s"


async def test_headers_and_state(start_http_router: StartHttpRouter) -> None:
    """Each file of the page has the strict policy, and the state is one JSON object."""
    router = await start_http_router(FakeGroup())
    for path in ("/", "/dashboard", "/dashboard/app.js", "/dashboard/style.css", "/dashboard/icon.svg"):
        status, headers, _ = await router.request("GET", path)
        policy = headers["content-security-policy"]
        assert status == 200 and policy.startswith("default-src 'none'") and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    status, _, text = await router.request("GET", "/dashboard/state")
    state = json.loads(text)
    assert status == 200 and state["state"] == "serving" and state["groups"][0]["device"]["total"] == 64
    assert (await router.request("GET", "/dashboard/../config.py"))[0] == 404


async def test_a_key_opens_the_page(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """With keys required, a browser without a key is asked for one; a user's key is not enough, and a monitor's shows
    everything."""
    keys = {"eyes": "cc-eyes", "search": "cc-search"}
    roles = {"eyes": "monitor", "search": "user"}
    tenants = [{"name": name, "keys": [hash_key(key)], "role": roles[name]} for name, key in keys.items()]
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    router = await start_http_router(FakeGroup(), key_file=str(file))
    assert (await router.request("GET", "/"))[0] == (await router.request("GET", "/dashboard/state"))[0] == 401
    user = base64.b64encode(b"me:cc-search").decode()
    assert (await router.request("GET", "/dashboard/state", headers={"authorization": f"Basic {user}"}))[0] == 403
    async with Browser() as browser:
        await browser.open(f"http://me:cc-eyes@{router.http_address}/")
        await browser.see("document.querySelector('#state').textContent", "serving")
        await browser.see(f"{CARD} && {CARD}.querySelector('.badge').textContent", "serving")
