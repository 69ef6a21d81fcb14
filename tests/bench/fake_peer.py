"""`python -m tests.bench.fake_peer PORT [MOOD]`: the fake server as a process that a peers file starts.

Moods: well; slow (healthy after its second look); dies (at once, with a word); deaf (never healthy); stubborn (ignores
SIGTERM, and has a child that does so too); dies-later (at its third answer that is not a tiny one).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from aiohttp import web

from .fake_server import FakeServer, Script

CHILD = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


class FakePeer(FakeServer):
    def __init__(self, port: int, mood: str) -> None:
        self._port, self._mood, self._num_looks, self._num_long = port, mood, 0, 0
        super().__init__(self._answer_by_mood)

    def _answer_by_mood(self, body: dict[str, Any]) -> Script:
        self._num_long += body["max_tokens"] != 3
        if self._mood == "dies-later" and self._num_long == 3:
            print("out of memory", flush=True)
            os._exit(9)
        return Script(first_seconds=0.002, gap_seconds=0.001, cached_tokens=0)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped, self._released, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.get("/health", self._health),
                        web.post("/v1/completions", self._answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._is_up.set()
        await self._stopped.wait()

    async def _health(self, request: web.Request) -> web.Response:
        self._num_looks += 1
        is_well = self._mood != "deaf" and (self._mood != "slow" or self._num_looks > 1)
        return web.Response(status=200 if is_well else 503)


def main() -> None:
    port, mood = int(sys.argv[1]), sys.argv[2]
    print(f"fake peer, {mood}", flush=True)
    if mood == "dies":
        sys.exit("cannot find the weights")
    if mood == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("child", subprocess.Popen([sys.executable, "-c", CHILD]).pid, flush=True)
    FakePeer(port, mood)
    time.sleep(600)


if __name__ == "__main__":
    main()
