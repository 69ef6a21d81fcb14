"""`python -m tests.server.serve_fake`: serve() on the fake engine, for tests of signals. A prompt "slow" never ends."""

from __future__ import annotations

import asyncio
import sys

from paceline.clock import WallClock
from paceline.config import ServerConfig
from paceline.server.serve import serve

from .fake_engine import FakeEngine


class UnhurriedEngine(FakeEngine):
    """Holds after the first step of a slow prompt."""

    def step(self) -> None:
        super().step()
        if any(bytes(choice.submit.prompt_token_ids) == b"slow" for choice in self._running.values()):
            self.hold()


async def make_engine() -> FakeEngine:
    await asyncio.sleep(0)
    return UnhurriedEngine()


if __name__ == "__main__":
    sys.exit(serve(make_engine, ServerConfig(port=0, grace_seconds=60.0), "fake-model", lambda: 0, WallClock()))
