"""The cells of tgi-vs-vllm against running servers, by the load generator. Needs aiohttp."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..load_generator import CellPlan, run_cell
from ..targets import HttpOptions, HttpTarget
from .tgi_vs_vllm import Plan, Ran, Tell, cell_name


def measure(plan: Plan, url: str, concurrency: int, tell: Tell) -> Ran:
    return asyncio.run(_measure(plan, url, concurrency, tell))


async def _measure(plan: Plan, url: str, concurrency: int, tell: Tell) -> Ran:
    async with HttpTarget(url, HttpOptions()) as target:
        name = cell_name("server", target.name, concurrency)
        asked = plan.requests(name, prompts=target.forms[0])
        warm_up = [replace(one, request_id=f"warm-up-{one.request_id}")
                   for one in plan.requests(f"{name} warm-up", prompts=target.forms[0])[:1]]
        result = await run_cell(target, asked, CellPlan(name=name, concurrency=concurrency, warm_up=warm_up))
    tell(f"{name}: {len(result.records)} requests")
    refused = sum(record.status == "refused" for record in result.records)
    return Ran("server", target.name, concurrency, result.records, {
        "preemptions": result.grown.get("num_preemptions"), "refusals": {"at the door": refused} if refused else {},
        "warm_up_requests": len(warm_up), "about": target.about()}, loop_lags=result.loop_lags)
