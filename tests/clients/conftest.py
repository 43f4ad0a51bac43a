"""One gateway with the bundled model for all clients, and one with a model that says what a capable one would."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from serve_app.bundled import ensure_bundled_model
from tests.clients.capable import capable_engine
from tests.clients.served import Served, bundled_engine, serve
from tests.clients.ways import WAYS, Ask, asking

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def home() -> Path:
    """Where the bundled model is kept between runs."""
    return Path(os.environ.get("SERVE_APP_TEST_HOME", ROOT / ".serve-app" / "test"))


@pytest.fixture(scope="session")
def model_path(home: Path) -> Path:
    return ensure_bundled_model(home, print)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, model_path: Path, home: Path) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("clients"), lambda: bundled_engine(model_path, home)) as running:
        yield running


@pytest.fixture(scope="session")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same with the scripted model of `tests.clients.capable`."""
    with serve(tmp_path_factory.mktemp("capable"), capable_engine) as running:
        yield running


@pytest.fixture
def client(service: Served) -> Iterator[OpenAI]:
    """The SDK, which refuses every answer that is not of its types."""
    with OpenAI(
        api_key=service.key, base_url=service.base_url, max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture
async def async_client(service: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        api_key=service.key, base_url=service.base_url, max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made


# Two of the four are enough for every day.
EVERY_DAY = ("whole", "streamed, async")


@pytest.fixture(params=[way if way in EVERY_DAY else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def ask(request: pytest.FixtureRequest, client: OpenAI, async_client: AsyncOpenAI) -> Ask:
    """A request, whole or streamed, sync or async."""
    return asking(request.param, client, async_client)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))
