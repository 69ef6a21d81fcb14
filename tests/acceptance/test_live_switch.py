"""Policies switched on a real server under load: nothing is lost, and every answer is that of the request alone."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import aiohttp

from .test_server_under_load import BLOCK_SIZE, alone, complete, crowd, num_blocks_together

ADMIN = {"x-api-key": "root-key"}
OWN_CACHE = {"prefix_cache": "hash", "block_size": BLOCK_SIZE}    # which stays, whatever the preset has
PRESETS = [{"preset": name} | OWN_CACHE for name in ("tgi", "static", "paceline", "fastgen", "lmdeploy", "vllm")]
KNOBS = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "ordering": "priority", "victim": "lowest_priority"}
SWITCHES: list[dict] = [*PRESETS[:3], KNOBS, *PRESETS[3:]]


async def switch_while_they_run(url: str, bodies: list[dict[str, object]]) -> tuple[list[str], list[dict]]:
    """The texts, and the answers of the switches: one each time a share of the requests has ended."""
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [asyncio.ensure_future(complete(session, url, body)) for body in bodies]
        told = []
        for number, switch in enumerate(SWITCHES):
            await until_ended(tasks, (number + 1) * len(tasks) // (len(SWITCHES) + 2))
            async with session.post(f"{url}/admin/policy", json=switch, headers=ADMIN) as response:
                assert response.status == 200, await response.text()
                told.append(await response.json())
        assert not all(task.done() for task in tasks), "the last switch came when all was over"
        return await asyncio.gather(*tasks), told


async def until_ended(tasks: list[asyncio.Future[str]], num_ended: int) -> None:
    while sum(task.done() for task in tasks) < num_ended:
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)


def test_presets_are_switched_under_load(serve) -> None:
    bodies = crowd()[:80]
    num_kv_blocks = num_blocks_together(bodies) * 10 // 100
    server = serve("--num-kv-blocks", str(num_kv_blocks), "--block-size", str(BLOCK_SIZE), "--preset", "vllm",
                   environment={"PACELINE_ADMIN_KEY": "root-key"})
    texts, told = asyncio.run(switch_while_they_run(server.url, bodies))
    assert {one["new"]["policy"]["regime"] for one in told} == {"static_padded", "continuous"}
    assert all(later["old"] == earlier["new"] for earlier, later in pairwise(told))
    assert server.metric("paceline:policy_switches_total") == len(told) == len(SWITCHES)
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
    assert sum("policy switched" in line for line in server.log) == len(told)
    assert texts == alone(bodies)
