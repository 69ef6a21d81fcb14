"""An event loop whose time passes only while everybody waits, and then at once: delays are exact on any machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.bench.call import Call
from paceline.bench.load_generator import CellPlan, CellResult, Watcher, run_cell
from paceline.bench.records import Asked

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "everybody waits for nothing"
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


class ScriptedTarget:
    """A server of `slots` slots, first come first served: the first token after first_seconds in a slot, each further
    one after gap_seconds."""

    name = "scripted"
    max_context = None
    vocab_size = None
    forms = ("ids", "text", "messages")

    def __init__(self, first_seconds: float, gap_seconds: float, slots: int = 1_000) -> None:
        self.first_seconds, self.gap_seconds = first_seconds, gap_seconds
        self._free = asyncio.Semaphore(slots)
        self.sent: list[tuple[str, float]] = []

    def about(self) -> dict[str, Any]:
        return {}

    async def __aenter__(self) -> ScriptedTarget:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def prepare(self, asked: Asked) -> Asked:
        return asked

    async def send(self, prepared: Asked, call: Call) -> None:
        call.sent_at = call.clock()
        self.sent.append((prepared.request_id, call.sent_at))
        async with self._free:
            for number in range(prepared.num_output_tokens):
                await asyncio.sleep(self.gap_seconds if number else self.first_seconds)
                call.chunk(call.clock(), 1, "token_ids")
        call.output_tokens, call.prompt_tokens = prepared.num_output_tokens, prepared.num_prompt_tokens
        call.finish_reason = "length"
        call.end(call.clock())

    async def counters(self) -> dict[str, int]:
        return {}


def measured(requests: list[Asked], plan: CellPlan, watch: Watcher | None = None, **target: Any
             ) -> tuple[CellResult, ScriptedTarget]:
    """A cell in virtual time."""

    async def run() -> tuple[CellResult, ScriptedTarget]:
        scripted = ScriptedTarget(**target)
        return await run_cell(scripted, requests, plan, watch, asyncio.get_running_loop().time), scripted

    return run_virtually(run())
