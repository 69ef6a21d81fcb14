"""What a policy may look at. Reads only: a policy answers a question, the scheduler acts on the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..config import SchedulerConfig
from ..kv.prefix_hash import PrefixHit
from ..request import Request
from .plan import SchedulerOutput, StepResult
from .step_time import StepTimeModel


class WaitingView(Protocol):
    def __len__(self) -> int: ...

    def oldest(self) -> Request | None:
        """Who has been queued longest."""


class KVView(Protocol):
    """The questions of the KV manager, without its changes."""

    num_blocks: int
    block_size: int

    @property
    def num_free_blocks(self) -> int: ...

    def num_blocks_for(self, num_tokens: int) -> int: ...

    def look_up(self, request: Request) -> PrefixHit: ...

    def computing_next_block(self, request: Request, hit: PrefixHit) -> str | None: ...

    def num_blocks_to_start(self, request: Request, hit: PrefixHit) -> int: ...

    def num_blocks_held(self, request: Request) -> int: ...


class BatchView(Protocol):
    """The batch of regimes that run whole batches (`batching.Batch`)."""

    @property
    def num_members(self) -> int: ...

    @property
    def is_open(self) -> bool: ...


@dataclass(slots=True)
class Observations:
    """What past steps measured. Changed in `Scheduler.update` only, from results."""

    num_steps: int = 0
    num_step_tokens: int = 0                # input tokens of all steps
    step_seconds: float = 0.0               # their durations together
    num_finished: int = 0                   # requests that ended by STOP or LENGTH
    num_finished_output_tokens: int = 0     # what those generated
    step_time: StepTimeModel = field(default_factory=StepTimeModel)

    def step_ran(self, plan: SchedulerOutput, result: StepResult) -> None:
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens
        self.step_seconds += result.duration_seconds
        self.step_time.observe(plan, result.duration_seconds)

    def request_ended(self, num_output_tokens: int) -> None:
        self.num_finished += 1
        self.num_finished_output_tokens += num_output_tokens


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """One step's world as policies see it."""

    waiting: WaitingView
    running: Sequence[Request]      # in the ordering's order
    kv: KVView
    now: float
    config: SchedulerConfig
    observations: Observations
    batch: BatchView
