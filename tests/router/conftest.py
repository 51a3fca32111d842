"""Fixtures of the router's tests: a model directory, and a router in front of fake groups."""

import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.router_under_test import RouterUnderTest, StartRouter, launch_router
from tests.router.tiny_tokenizer import write_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a chat template."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> TokenizerJson:
    """The tokenizer of `model_directory`."""
    return TokenizerJson.load(str(model_directory))


@pytest.fixture
async def start_router(tokenizer: TokenizerJson) -> AsyncIterator[StartRouter]:
    """Starts a router in front of the given groups; closes all of them after the test."""
    started: list[RouterUnderTest] = []

    async def start(
        *groups: FakeGroup,
        attached: bool = True,
        tokenizer: TokenizerJson | None = tokenizer,
        kind: type[RouterUnderTest] = RouterUnderTest,
        **settings: object,
    ) -> RouterUnderTest:
        """`attached`: wait until all groups serve. `tokenizer`: None lets the router read the files of its `model`."""
        router = await launch_router(kind, tokenizer, groups, **settings)
        started.append(router)
        if attached:
            await router.wait_for_groups(len(groups))
        return router

    yield start
    for router in started:
        await router.close()


@pytest.fixture
def start_http_router(start_router: StartRouter) -> StartHttpRouter:
    """Starts a router that also listens for HTTP."""
    return partial(start_router, http_port=0, kind=HttpRouter)  # type: ignore[return-value]  # `kind` decides it


@pytest.fixture
def tests_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts can import the tests, wherever they run."""
    root, path = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, path])))
