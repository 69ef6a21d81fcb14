"""A server whose engine is the real one, core and transport, on shadow slots: its tokens mean nothing, its schedule is
true. A test may hold it between two steps."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from paceline.build import build_policies, reads_priority
from paceline.clock import WallClock
from paceline.config import CacheConfig, SchedulerConfig, ServerConfig
from paceline.engine.async_engine import AsyncEngine, ServedModel
from paceline.engine.core import EngineCore
from paceline.engine.events import EngineEvents
from paceline.engine.messages import Ready
from paceline.engine.queue_limits import QueueLimits
from paceline.engine.transport import ThreadTransport
from paceline.kv.manager import KVCacheManager
from paceline.kv.prefix_hash import PREFIX_CACHES
from paceline.policy_book import PolicyBook
from paceline.sched.plan import SchedulerOutput, StepResult
from paceline.sched.scheduler import Scheduler

from ..fakes import ShadowExecutor
from .conftest import RunningServer
from .fake_engine import FakeModel

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 4, 200


class GatedExecutor(ShadowExecutor):
    """Runs a step only when the gate is open."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.gate = threading.Semaphore(1 << 20)

    def collect(self, ticket: SchedulerOutput) -> StepResult:
        self.gate.acquire()
        return super().collect(ticket)


@dataclass
class Loaded:
    core: EngineCore
    ready: Ready

    def close(self) -> None:
        pass


class RealCoreServer(RunningServer):
    def __init__(self, config: ServerConfig, scheduler: SchedulerConfig | None = None,
                 num_blocks: int = NUM_BLOCKS) -> None:
        scheduler = scheduler or SchedulerConfig()
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, PREFIX_CACHES["hash"])
        self.scheduler = Scheduler(scheduler, kv, build_policies(scheduler), max_model_len=MAX_MODEL_LEN)
        self.executor = GatedExecutor(num_blocks)
        super().__init__(config)

    async def _make_engine(self) -> AsyncEngine:    # type: ignore[override]
        book = PolicyBook(CacheConfig(num_kv_blocks=self.scheduler.kv.num_blocks), build_policies, reads_priority)
        core = EngineCore(self.scheduler, self.executor, WallClock(), EngineEvents(_report), policy_book=book)
        ready = Ready(max_model_len=self.scheduler.max_model_len, num_blocks=self.scheduler.kv.num_blocks,
                      block_size=BLOCK_SIZE, fingerprint="shadow", reads_priority=False,
                      policy=book.describe(self.scheduler.config))
        engine = AsyncEngine(ThreadTransport(lambda: Loaded(core, ready)), _served, QueueLimits.of(self.config),
                             WallClock())
        await engine.start()
        await engine.ready()
        return engine


def _report(listener: object, error: Exception) -> None:
    raise error


def _served(ready: Ready) -> ServedModel:
    model = FakeModel()
    return ServedModel(
        tokenizer=model.tokenizer, chat_template=model.chat_template, max_model_len=ready.max_model_len,
        eos_token_ids=model.eos_token_ids, fingerprint=ready.fingerprint, reads_priority=ready.reads_priority,
        vocab_size=model.vocab_size)
