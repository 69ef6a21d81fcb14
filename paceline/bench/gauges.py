"""What a server tells of itself over time: its /metrics page, looked at while a load runs.

Known are the gauges of vLLM (and of this package, which has the same names), TGI and llama.cpp. A page that cannot be
had is no failure: the charts over time then lack this contestant.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp

from .journal_view import Sample

LOOK_SECONDS = 0.25
GAUGES = {
    "running": ("vllm:num_requests_running", "tgi_batch_current_size", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "tgi_queue_size", "llamacpp:requests_deferred"),
    "used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio"),
}
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? ([^ \n]+)", re.M)


def gauges_in(page: str) -> dict[str, float]:
    """By the names of GAUGES, summed over labels; what the page does not tell is left out."""
    values: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        with suppress(ValueError):
            values[name] = values.get(name, 0.0) + float(value)
    return {ours: values[name] for ours, names in GAUGES.items() for name in reversed(names) if name in values}


class Gauges:
    """Samples with absolute times of time.perf_counter; `since` makes them relative."""

    def __init__(self) -> None:
        self._found: list[tuple[float, dict[str, float]]] = []

    def since(self, zero: float) -> list[Sample]:
        return [Sample(at - zero, int(values.get("running", 0)), int(values.get("waiting", 0)),
                       {"used": values["used"]} if "used" in values else {})
                for at, values in self._found if at >= zero]

    async def look(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                async with session.get(url) as response:
                    if response.status != 200:
                        return
                    page = await response.text()
                if not (values := gauges_in(page)):
                    return
                self._found.append((time.perf_counter(), values))
                await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def watching(base_url: str | None) -> AsyncIterator[Gauges]:
    """Looks at the server's page until the block ends."""
    gauges = Gauges()
    if base_url is None:
        yield gauges
        return
    task = asyncio.ensure_future(gauges.look(base_url + "/metrics"))
    try:
        yield gauges
    finally:
        task.cancel()
        # Whatever ended it, a server that broke off first of all: the load's own records tell of that.
        with suppress(asyncio.CancelledError, aiohttp.ClientError, TimeoutError, OSError):
            await task
