"""Policies switched on a real server under load: nothing is lost, and every answer is that of the request alone."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice, pairwise

import aiohttp

from paceline.presets import PRESETS

from .test_server_under_load import BLOCK_SIZE, alone, complete, crowd, num_blocks_together

ADMIN = {"x-api-key": "root-key"}
LIVE = [name for name, preset in PRESETS.items() if preset.cache.get("prefix_cache", "hash") == "hash"]
NUM_SWITCHES = 2 * len(LIVE) + 2
KNOBS = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "ordering": "priority", "victim": "lowest_priority"}


async def switch_while_they_run(url: str, bodies: list[dict[str, object]]) -> tuple[list[str], list[dict]]:
    """The texts, and the answers of the switches: one each time a share of the requests has ended."""
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [asyncio.ensure_future(complete(session, url, body)) for body in bodies]
        switches = [{"preset": name} for name in islice(cycle(LIVE), NUM_SWITCHES - 1)]
        told = []
        for number, switch in enumerate([*switches[:2], KNOBS, *switches[2:]]):
            await until_ended(tasks, (number + 1) * len(tasks) // (NUM_SWITCHES + 2))
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
    server = serve("--num-kv-blocks", str(num_kv_blocks), "--block-size", str(BLOCK_SIZE), "--preset", LIVE[0],
                   environment={"PACELINE_ADMIN_KEY": "root-key"})
    texts, told = asyncio.run(switch_while_they_run(server.url, bodies))
    assert [one["new"]["preset"] for one in told].count(None) == 1
    assert all(later["old"] == earlier["new"] for earlier, later in pairwise(told))
    assert server.metric("paceline:policy_switches_total") == NUM_SWITCHES
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
    assert sum("policy switched" in line for line in server.log) == NUM_SWITCHES
    assert texts == alone(bodies)
