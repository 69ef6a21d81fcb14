"""`python -m tests.server.serve_broken error|hang|crash thread|process`: serve() on the real engine loop over shadow
slots, whose fifth step breaks."""

from __future__ import annotations

import sys
from functools import partial

from paceline.clock import WallClock
from paceline.config import ServerConfig
from paceline.engine.async_engine import AsyncEngine, ServedModel
from paceline.engine.messages import Ready
from paceline.engine.queue_limits import QueueLimits
from paceline.engine.transport import TRANSPORTS
from paceline.model.dummy import dummy_tokenizer
from paceline.server.serve import serve
from tests.engine.test_doors import load


def served(ready: Ready) -> ServedModel:
    return ServedModel(tokenizer=dummy_tokenizer(300), chat_template=None, max_model_len=ready.max_model_len,
                       eos_token_ids=frozenset(), fingerprint=ready.fingerprint, vocab_size=64)


async def make_engine(how: str, transport: str) -> AsyncEngine:
    config = ServerConfig(step_timeout_seconds=0.5)
    engine = AsyncEngine(TRANSPORTS[transport](partial(load, 4, how)), served, QueueLimits.of(config), WallClock(),
                         config.step_timeout_seconds)
    await engine.start()
    await engine.ready()
    return engine


if __name__ == "__main__":
    sys.exit(serve(partial(make_engine, *sys.argv[1:]), ServerConfig(port=0, grace_seconds=3600.0), "shadow", lambda: 0,
                   WallClock()))
