"""One gateway with the tiny model for all clients, and one with a scripted model that acts like a capable one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from serve_app.engine.text.detokenizer import Vocabulary
from tests.clients.capable import capable_engine
from tests.clients.served import Served, serve, tiny_engine
from tests.clients.ways import WAYS, Ask, asking
from tests.clients.whole import Whole
from tests.service.started import OTHER_CONFIG, started


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, model_home: Path
) -> Iterator[Served | Whole]:
    if OTHER_CONFIG is not None:
        with started(request.getfixturevalue("model_path")) as whole:
            yield Whole(whole)
        return
    tiny = request.getfixturevalue("tiny_path")
    with serve(tmp_path_factory.mktemp("clients"), lambda: tiny_engine(tiny, model_home)) as running:
        yield running


@pytest.fixture(scope="session")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same with the scripted model of `tests.clients.capable`."""
    with serve(tmp_path_factory.mktemp("capable"), capable_engine) as running:
        yield running


@pytest.fixture(scope="session")
def client(service: Served) -> Iterator[OpenAI]:
    """The SDK with strict validation: it rejects responses that do not fit its types."""
    with OpenAI(
        api_key=service.key, base_url=service.base_url, max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture
async def async_client(service: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        api_key=service.key,
        base_url=service.base_url,
        max_retries=0,
        timeout=60,
        http_client=DefaultAsyncHttpxClient(verify=False),  # else each reads the certificates of authorities
        _strict_response_validation=True,
    ) as made:
        yield made


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, client: OpenAI, async_client: AsyncOpenAI) -> Ask:
    """A request, whole or streamed, sync or async."""
    return asking(request.param, client, async_client)


@pytest.fixture(scope="session")
def tokenizer(bundled_tokenizer: Any) -> Any:
    """The models'."""
    return bundled_tokenizer


@pytest.fixture(scope="session")
def id_of(tokenizer: Any) -> Callable[[list[int] | None], str]:
    """The id of a token of a reply, by its bytes."""
    vocabulary = Vocabulary(tokenizer)
    ids = {vocabulary.spelling(number): str(number) for number in range(len(tokenizer))}
    return lambda raw: ids[bytes(raw or ())]
