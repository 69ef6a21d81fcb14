"""The contestants as they run: presets of ours in this process, servers by URL, and peers that were started for it.

An entrant gives a Target for each cell. A preset gets a new engine for every cell, with an empty cache and a journal;
the weights are shared. Servers stay up throughout; between their cells they idle.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..clock import WallClock
from ..config import EngineConfig, JournalConfig
from ..engine.async_engine import AsyncEngine
from ..errors import EngineError
from ..presets import PRESETS, describe_preset
from .comparison import Contestant
from .engine_target import EngineTarget
from .peers import PeerServer, PeerTarget
from .targets import HttpOptions, HttpTarget, Target

MakeEngine = Callable[[EngineConfig], AsyncEngine]


class Entrant(Protocol):
    @property
    def contestant(self) -> Contestant: ...

    @property
    def base_url(self) -> str | None:
        """Where its /metrics may be."""

    def target(self, journal: Path | None) -> AbstractAsyncContextManager[Target]:
        """For one cell. journal: where our own engine is to write down what it decides."""


class PresetEntrant:
    """One of our schedules, on weights that all of them share."""

    base_url = None

    def __init__(self, name: str, config: EngineConfig, make_engine: MakeEngine) -> None:
        self._config = config
        self._make_engine = make_engine
        self.contestant = Contestant(name=name, kind="preset", about=f"{PRESETS[name].signature}. In process.",
                                     facts={"source": PRESETS[name].source, "differs": PRESETS[name].differs,
                                            **describe_preset(name, config)["rows"]})

    @asynccontextmanager
    async def target(self, journal: Path | None) -> AsyncIterator[Target]:
        config = self._config if journal is None else replace(self._config, journal=JournalConfig(journal=str(journal)))
        engine = self._make_engine(config)
        await engine.start()
        try:
            await engine.ready()
            self._learn({"max_model_len": engine.model.max_model_len, "fingerprint": engine.model.fingerprint,
                         "notices": list(engine.notices) or None})
            yield EngineTarget(engine, WallClock(), self.contestant.name, {"preset": self.contestant.name})
            if (stats := engine.stats) is not None:
                block_size = self._config.cache.block_size
                self._learn({"kv_blocks": stats.num_blocks, "kv_tokens": stats.num_blocks * block_size})
        finally:
            await engine.stop()

    def _learn(self, facts: dict[str, Any]) -> None:
        """What only a built engine knows."""
        self.contestant = replace(self.contestant, facts={**self.contestant.facts, **facts})


class UrlEntrant:
    """A server that runs already."""

    def __init__(self, name: str, url: str, options: HttpOptions) -> None:
        self._url = url
        self._options = options
        self.base_url: str | None = HttpTarget(url, options).name
        self.contestant = Contestant(name=name, kind="url", about=f"A running server, {url}.")

    @asynccontextmanager
    async def target(self, journal: Path | None) -> AsyncIterator[Target]:
        async with HttpTarget(self._url, self._options) as target:
            self.contestant = replace(self.contestant, facts=target.about())
            yield target


class PeerEntrant:
    """A server that was started for this comparison. It is held while others are measured."""

    def __init__(self, server: PeerServer, timeout_seconds: float) -> None:
        self._server = server
        self._timeout_seconds = timeout_seconds
        self.base_url: str | None = server.url
        about = server.peer.about or "A server started for this comparison."
        self.contestant = Contestant(name=server.peer.name, kind="peer", about=about)

    @asynccontextmanager
    async def target(self, journal: Path | None) -> AsyncIterator[Target]:
        if (trouble := self._server.trouble()) is not None:
            raise EngineError(trouble)
        self._server.resume()
        try:
            async with PeerTarget(self._server, self._timeout_seconds) as target:
                self.contestant = replace(self.contestant, facts={
                    "command": self._server.command, **dict(self._server.peer.environment), **target.about(),
                    "ready after": f"{self._server.start_seconds:.1f} s", "log": str(self._server.log)})
                yield target
        finally:
            self._server.pause()
