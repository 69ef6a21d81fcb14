"""What a real server wrote down under load, through hang-ups and a SIGTERM, replays to the same plans."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from paceline import journals

from .test_server_under_load import complete, crowd, hang_up


async def load(url: str, bodies: list[dict[str, object]]) -> None:
    """Every fifth client leaves before its answer is there."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(hang_up(session, url, body) if index % 5 == 0 else complete(session, url, body)
                               for index, body in enumerate(bodies)))


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_it_replays_after_a_drain(serve, tmp_path: Path, transport: str) -> None:
    path, bodies = tmp_path / "journal", crowd()[:60]
    server = serve("--num-kv-blocks", "60", "--journal", str(path), "--transport", transport)
    asyncio.run(load(server.url, bodies))
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.stop() == 0
    seen = journals.replayed(str(path))
    assert seen.difference is None, str(seen.difference)
    assert seen.num_requests == len(bodies)
    assert {output.finish_reason.value for output in seen.finished} == {"length", "abort"}
    content = path.read_text()
    for body in bodies:
        assert json.dumps(body["prompt"][:3], separators=(",", ":"))[1:-1] not in content


def test_a_server_that_is_killed_leaves_a_journal_that_replays_up_to_the_cut(serve, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    server = serve("--journal", str(path))

    async def run_and_kill() -> None:
        async with aiohttp.ClientSession() as session:
            body = crowd()[0] | {"stream": True, "max_tokens": 2000}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                while path.stat().st_size < 20_000:
                    await response.content.readline()
                server.process.kill()

    asyncio.run(run_and_kill())
    server.process.wait(60)
    seen = journals.replayed(str(path))
    assert seen.difference is None and seen.num_steps > 20


def test_a_full_disk_ends_the_journal_and_not_the_server(serve) -> None:
    server = serve("--journal", "/dev/full")
    texts = [asyncio.run(one(server.url, body)) for body in crowd()[:3]]
    assert all(texts)
    assert server.stop() == 0
    notices = [line for line in server.log if "journal" in line.lower()]
    assert len(notices) == 1 and "No space left on device" in notices[0]


async def one(url: str, body: dict[str, object]) -> str:
    async with aiohttp.ClientSession() as session:
        return await complete(session, url, body)
