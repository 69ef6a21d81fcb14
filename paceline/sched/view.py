"""What a policy may look at. Reads only: a policy answers a question, the scheduler acts on the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..config import SchedulerConfig
from ..kv.prefix_hash import PrefixHit
from ..request import Request
from .observed import OutputLengths, TenantService
from .plan import SchedulerOutput, StepResult
from .step_time import StepTimeModel


class WaitingView(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def oldest(self) -> Request | None:
        """Who has been queued longest."""


class KVView(Protocol):
    """The questions of the KV manager, without its changes."""

    num_blocks: int
    block_size: int

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_in_transit_blocks(self) -> int: ...

    def num_blocks_for(self, num_tokens: int) -> int: ...

    def look_up(self, request: Request) -> PrefixHit: ...

    def computing_next_block(self, request: Request, hit: PrefixHit) -> str | None: ...

    def num_blocks_to_continue(self, request: Request, num_new_tokens: int) -> int: ...

    def num_blocks_held(self, request: Request) -> int: ...

    def num_blocks_to_start(self, request: Request, hit: PrefixHit) -> int: ...

    def num_blocks_to_reach(self, request: Request, hit: PrefixHit, num_tokens: int) -> int: ...

    def num_blocks_to_grow(self, growing: Iterable[tuple[Request, int]]) -> int: ...


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
    num_steps_since_start: int = 0          # steps since one in which a request left the queue
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    service: TenantService = field(default_factory=TenantService)
    step_time: StepTimeModel = field(default_factory=StepTimeModel)

    def note_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens
        self.step_seconds += result.duration_seconds
        self.step_time.observe(plan, result.duration_seconds)
        self.num_steps_since_start = 0 if plan.num_started else self.num_steps_since_start + 1

    def note_end(self, request: Request) -> None:
        self.num_finished += 1
        self.num_finished_output_tokens += request.num_output_tokens
        self.output_lengths.note(request)


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerView:
    """One step's world as policies see it."""

    waiting: WaitingView
    running: Sequence[Request]      # in the ordering's order
    kv: KVView
    now: float
    config: SchedulerConfig
    observations: Observations
    max_model_len: int              # tokens that no request grows beyond
    batch: BatchView
