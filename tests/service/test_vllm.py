"""The whole service on vLLM (`make test-vllm`): bills by its counts, accounts apart, and the death of its process."""

from __future__ import annotations

import asyncio
import os
import signal

import openai
import psutil
import pytest

from tests.service.harness import FRANCE, Service, charge, nano, until
from tests.service.started import OTHER_CONFIG

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif("vllm" not in (OTHER_CONFIG or ""), reason="needs a service on vLLM: make test-vllm"),
]
LONG = [{"role": "user", "content": "The river runs past the mill, the bridge and the old harbour. " * 30}]


def engine_processes(service: Service) -> list[psutil.Process]:
    """vLLM's own process of each replica."""
    found = []
    for process in psutil.Process(service.process.pid).children(recursive=True):
        try:
            if "VLLM::EngineCore" in " ".join(process.cmdline()) or "VLLM::Engine" in process.name():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_reply_is_billed_as_its_usage_says(service: Service) -> None:
    account = service.account("vllm")
    reply = account.client().chat.completions.create(model="svc-chat", messages=FRANCE, max_tokens=20, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == service.prompt_tokens(FRANCE)
    assert reply.usage.completion_tokens == service.reply_tokens(reply.choices[0].message.content or "")
    assert nano("5") - nano(account.settled(1)["balance"]) == charge(reply.usage)


def test_an_account_finds_its_own_prompt_again_and_no_other_does(service: Service) -> None:
    def cached(account: openai.OpenAI) -> int:
        reply = account.chat.completions.create(model="svc-chat", messages=LONG, max_tokens=2)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    reader, stranger = service.account("reader").client(), service.account("stranger").client()
    assert cached(reader) == 0
    assert cached(reader) > 100
    assert cached(stranger) == 0


def test_vllms_own_metrics_are_scraped_with_the_services(service: Service) -> None:
    def found() -> list[str]:
        lines = service.http.get(service.metrics_url).text.splitlines()
        return [line for line in lines if line.startswith("ray_vllm_generation_tokens_total{")]

    client = service.account("metrics").client()
    client.chat.completions.create(model="svc-chat", messages=FRANCE, max_tokens=20)
    [line] = until(found)
    assert 'application="smollm2"' in line
    assert float(line.split()[-1]) > 0


@pytest.mark.parametrize(
    ("victim", "sent"), [("engine", signal.SIGKILL), ("engine", signal.SIGSTOP), ("replica", signal.SIGKILL)]
)
async def test_a_lost_engine_is_replaced_and_nobody_pays_for_what_it_did_not_finish(
    service: Service, victim: str, sent: signal.Signals
) -> None:
    """Lost: killed, hung, or left by its replica. None of them leaves a process behind."""
    account = await asyncio.to_thread(service.account, f"vllm {victim} {sent.name}")
    [engine] = await asyncio.to_thread(until, lambda: engine_processes(service))

    began = asyncio.Semaphore(0)

    async def ask() -> None:
        async with service.async_client(account.key, timeout=600) as client:
            stream = await client.chat.completions.create(
                model="svc-chat", messages=FRANCE, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            has_begun = False
            async for chunk in stream:
                if not has_begun and chunk.choices and chunk.choices[0].delta.content:
                    has_begun = True
                    began.release()

    asked = [asyncio.create_task(ask()) for _ in range(3)]
    async with asyncio.timeout(300):
        for _ in asked:
            await began.acquire()
    [replica] = service.pids("smollm2:Model")
    os.kill(engine.pid if victim == "engine" else replica, sent)
    endings = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(ending, openai.APIError) for ending in endings), endings
    view = await asyncio.to_thread(account.settled, 3)
    assert nano(view["balance"]) == nano("5")

    def another() -> list[psutil.Process]:
        return [process for process in engine_processes(service) if process.pid != engine.pid]

    assert await asyncio.to_thread(until, lambda: not engine.is_running(), 60)
    assert await asyncio.to_thread(until, another, 600)
    client = account.client()

    def answers() -> bool:
        try:
            return bool(client.chat.completions.create(model="svc-chat", messages=FRANCE, max_tokens=4).id)
        except openai.APIStatusError:
            return False

    assert await asyncio.to_thread(until, answers, 600, 1.0)
