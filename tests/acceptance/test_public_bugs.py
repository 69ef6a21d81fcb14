"""Reports against other servers that need a real engine under a real server; docs/bugs.md names each."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import pytest

from .conftest import Server

Serve = Callable[..., Server]


def chat_body(topic: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Tell me about {topic}."}], "max_tokens": 150, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


async def chat(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a chat."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def content_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for one in events for choice in one["choices"])


def test_a_chat_that_was_preempted_twice_streams_each_token_once(serve: Serve) -> None:
    server = serve("--num-kv-blocks", "17", "--log-format", "json")
    bodies = [chat_body(topic) for topic in ("rivers", "bridges", "lanterns", "gardens")]

    async def all_at_once() -> list[list[dict[str, Any]]]:
        return list(await asyncio.gather(*(chat(server.url, body) for body in bodies)))

    crowded = asyncio.run(all_at_once())
    alone = [asyncio.run(chat(server.url, body)) for body in bodies]
    assert server.stop() == 0
    records = [json.loads(line) for line in server.log if '"event": "request"' in line]
    assert max(record["preemptions"] for record in records) >= 2
    for events, expected in zip(crowded, alone, strict=True):
        assert content_of(events) == content_of(expected)
        choices = [choice for one in events for choice in one["choices"]]
        assert [("role" in choice["delta"]) for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert events[-1]["usage"]["completion_tokens"] == 150


def test_usage_counts_the_whole_prompt_though_it_came_in_chunks(serve: Serve, tiny_model: str) -> None:
    server = serve("--max-num-batched-tokens", "16", model=tiny_model)
    body = {"prompt": [5, 6, 7, 8] * 50, "max_tokens": 3, "ignore_eos": True}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
    stream = httpx.post(f"{server.url}/v1/completions", timeout=60, json=body | {
        "stream": True, "stream_options": {"include_usage": True}}).text
    (last,) = [json.loads(line[6:])["usage"] for line in stream.splitlines() if '"usage":{' in line]
    for usage in (whole, last):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (200, 3, 203)


async def answer_all(url: str, num_requests: int) -> Counter[int]:
    """All at once, each on a connection of its own."""
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
    statuses: Counter[int] = Counter()

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            statuses[response.status] += 1
            answer = await response.json()
            if response.status == 200:
                assert answer["usage"]["completion_tokens"] == 20
            else:
                assert int(response.headers["retry-after"]) >= 1 and answer["error"]["code"] == "overloaded"

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(250)) as session:
        await asyncio.gather(*(ask(session) for _ in range(num_requests)))
    return statuses


def test_five_thousand_at_once_are_served_or_told_when_to_come_again(serve: Serve, tiny_model: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 6000:
        pytest.skip("too few open files allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6000), hard))
    server = serve("--max-queue", "200", model=tiny_model)
    statuses = asyncio.run(answer_all(server.url, 5000))
    assert set(statuses) == {200, 429} and statuses.total() == 5000 and statuses[200] >= 200
    server.until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("paceline:requests_refused_total") == statuses[429]
    assert server.stop() == 0
