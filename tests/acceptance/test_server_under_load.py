"""What the server promises when memory is far too small for everybody: all finish, exactly; nobody leaks."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import httpx
import openai
import pytest

from paceline.build import LLM

QUESTION = "What is the capital of France? Answer in one sentence."
NUM_REQUESTS = 200
BLOCK_SIZE = 16


def test_the_first_question_of_the_readme(serve) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert server.stop() == 0


def crowd() -> list[dict[str, object]]:
    """Requests of mixed length, as token ids, half greedy and half drawn."""
    rng = random.Random(7)
    bodies = []
    for index in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000, 40000) for _ in range(rng.choice((5, 20, 60, 150)))]
        bodies.append({
            "model": "smollm2", "prompt": prompt, "max_tokens": rng.choice((4, 10, 24, 48)), "ignore_eos": True,
            "temperature": 0 if index % 2 else 0.8, "seed": index, "stream": index % 3 == 0})
    return bodies


def num_blocks_together(bodies: list[dict[str, object]]) -> int:
    return sum(-(-(len(body["prompt"]) + body["max_tokens"]) // BLOCK_SIZE) for body in bodies)    # type: ignore[arg-type]


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> str:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            return (await response.json())["choices"][0]["text"]
        text = ""
        async for line in response.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        return text


async def complete_all(url: str, bodies: list[dict[str, object]]) -> list[str]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        return await asyncio.gather(*(complete(session, url, body) for body in bodies))


def alone(bodies: list[dict[str, object]]) -> list[str]:
    """Each request in an engine that holds nothing else and never reuses anything."""
    fields = ("max_tokens", "ignore_eos", "temperature", "seed")
    with LLM("smollm2", prefix_cache="none", max_model_len=1024, num_kv_blocks=64) as llm:
        return [llm.generate([body["prompt"]], show_progress=False, **{name: body[name] for name in fields})[0].text
                for body in bodies]


def test_200_requests_on_four_percent_of_their_blocks(serve) -> None:
    bodies = crowd()
    num_kv_blocks = num_blocks_together(bodies) * 4 // 100
    server = serve("--num-kv-blocks", str(num_kv_blocks), "--block-size", str(BLOCK_SIZE))
    texts = asyncio.run(complete_all(server.url, bodies))
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
    assert texts == alone(bodies)


async def hang_up(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> None:
    """Leaves a stream after its first tokens, or a plain request while it runs."""
    post = session.post(f"{url}/v1/completions", json=body | {"max_tokens": 500})
    if not body["stream"]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post, 0.5)
        return
    async with post as response:
        await response.content.readline()
        response.close()


async def hang_up_all(url: str, bodies: list[dict[str, object]]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(hang_up(session, url, body) for body in bodies))


def test_200_clients_that_hang_up_leave_nothing_behind(serve) -> None:
    server = serve("--num-kv-blocks", "128")
    asyncio.run(hang_up_all(server.url, crowd()))
    server.until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert server.stop() == 0
