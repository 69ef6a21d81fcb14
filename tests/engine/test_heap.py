"""A serving process leaves what it has loaded out of its garbage collections."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import EngineDead
from paceline.sched.plan import SchedulerOutput, StepResult

from .test_doors import SETUP, Loaded, ShadowExecutor, load, submit, with_engine

SCRIPT = """
import gc
from paceline.engine import heap

class Cycle:
    alive = 0
    def __init__(self):
        Cycle.alive += 1
        self.own = self
    def __del__(self):
        Cycle.alive -= 1

loaded = [{index: [index]} for index in range(1000)]
youngest = gc.get_threshold()[0]
heap.settle()
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
assert not any(one is loaded for one in gc.get_objects())
for _ in range(youngest * 200):
    Cycle()
print(Cycle.alive <= youngest + 1, full)
"""


def test_what_is_loaded_is_frozen_and_what_is_dropped_later_is_soon_found() -> None:
    """In a process of its own: the collector is the whole process's."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "True []\n"


class TellsItsHeap(ShadowExecutor):
    def collect(self, ticket: SchedulerOutput) -> StepResult:
        raise RuntimeError(f"{gc.get_freeze_count() > 1000} and {gc.get_threshold()[2]}")


def load_and_tell() -> Loaded:
    loaded = load()
    loaded.core.executor = TellsItsHeap(SETUP.num_blocks, SETUP.block_size)
    return loaded


def test_an_engine_process_settles_its_heap_before_it_is_ready() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineDead, match="True and 1000"):
            async for _ in engine.submit(submit("a")):
                pass

    with_engine("process", story, load_and_tell)
