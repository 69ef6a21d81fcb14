"""What a policy may look at. Reads only: a policy answers a question, the scheduler acts on the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import SchedulerConfig
from ..kv.prefix_hash import PrefixHit
from ..request import Request


class WaitingView(Protocol):
    def __len__(self) -> int: ...


class KVView(Protocol):
    """The questions of the KV manager, without its changes."""

    num_blocks: int
    block_size: int

    @property
    def num_free_blocks(self) -> int: ...

    def num_blocks_for(self, num_tokens: int) -> int: ...

    def num_blocks_to_start(self, request: Request, hit: PrefixHit) -> int: ...


@dataclass(slots=True)
class Observations:
    """What past steps measured. Changed in `Scheduler.update` only, from results."""

    num_steps: int = 0
    num_step_tokens: int = 0                # input tokens of all steps
    step_seconds: float = 0.0               # their durations together
    num_finished: int = 0                   # requests that ended by STOP or LENGTH
    num_finished_output_tokens: int = 0     # what those generated


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """One step's world as policies see it."""

    waiting: WaitingView
    running: Sequence[Request]      # in the ordering's order
    kv: KVView
    now: float
    config: SchedulerConfig
    observations: Observations
