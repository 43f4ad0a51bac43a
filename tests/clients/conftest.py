"""One gateway with the bundled model for all clients, and one with a scripted model that acts like a capable one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from tests.clients.capable import capable_engine
from tests.clients.served import Served, bundled_engine, serve
from tests.clients.ways import WAYS, Ask, asking
from tests.clients.whole import Whole
from tests.service.started import OTHER_CONFIG, started

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, model_path: Path, model_home: Path) -> Iterator[Served | Whole]:
    if OTHER_CONFIG is not None:
        with started(model_path) as whole:
            yield Whole(whole)
        return
    with serve(tmp_path_factory.mktemp("clients"), lambda: bundled_engine(model_path, model_home)) as running:
        yield running


@pytest.fixture(scope="session")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same with the scripted model of `tests.clients.capable`."""
    with serve(tmp_path_factory.mktemp("capable"), capable_engine) as running:
        yield running


@pytest.fixture
def client(service: Served) -> Iterator[OpenAI]:
    """The SDK with strict validation: it rejects responses that do not fit its types."""
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


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, client: OpenAI, async_client: AsyncOpenAI) -> Ask:
    """A request, whole or streamed, sync or async."""
    return asking(request.param, client, async_client)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))
