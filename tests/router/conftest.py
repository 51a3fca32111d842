"""What the router's tests share: a model directory, and a router in front of fake groups."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coatcheck.router.config import RouterConfig
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.door import Door, OpenDoor
from tests.router.fake_group import FakeGroup
from tests.router.tiny_tokenizer import write_model
from tests.router.web import OpenWeb, Web


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template on disk."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> TokenizerJson:
    """The same, loaded."""
    return TokenizerJson.load(str(model_directory))


@pytest.fixture
async def open_door(tokenizer: TokenizerJson) -> AsyncIterator[OpenDoor]:
    """Starts a router in front of the groups it is given; everything ends with the test."""
    doors: list[Door] = []

    async def opened(
        *groups: FakeGroup, attached: bool = True, speaking: TokenizerJson | None = tokenizer, **settings: object
    ) -> Door:
        """`speaking`: None lets the router read the files of its `model`."""
        # Unlike real groups, fake ones say nothing unasked: on a busy machine they would seem to hang.
        settings = {"model": "tiny", "silence_seconds": 60.0, "cause_wait_seconds": 0.05, **settings}
        router = Router(RouterConfig(**settings), speaking)  # type: ignore[arg-type]  # by name
        address = await router.start()
        door = Door(router, address, list(groups))
        doors.append(door)
        await router.set_groups([await group.start() for group in groups])
        if attached:
            await door.serving(len(groups))
        return door

    yield opened
    for door in doors:
        await door.channel.close()
        await door.router.stop()
        for group in door.groups:
            await group.kill()


@pytest.fixture
async def open_web(open_door: OpenDoor) -> AsyncIterator[OpenWeb]:
    """Starts one in front of the groups it is given."""
    webs: list[Web] = []

    async def opened(*groups: FakeGroup, **settings: object) -> Web:
        webs.append(Web(await open_door(*groups, http_port=0, **settings)))
        return webs[-1]

    yield opened
    for web in webs:
        await web.openai.close()
