"""What a policy may look at. Reads only: a policy answers a question, the scheduler acts on the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..config import SchedulerConfig
from ..kv.prefix_hash import PrefixHit
from ..request import Request
from .observed import OutputLengths, Pace, TenantService
from .plan import SchedulerOutput, StepResult
from .step_time import StepTimeModel


class WaitingView(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def oldest(self) -> Request | None:
        """Who has been queued longest."""

    def head(self, view: SchedulerView) -> Request | None:
        """Who starts next."""


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
    pace: Pace = field(default_factory=Pace)
    service: TenantService = field(default_factory=TenantService)
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    landed_at: float | None = None          # the last step, where requests ran on after it

    def note_step(self, plan: SchedulerOutput, result: StepResult, now: float, *, goes_on: bool) -> None:
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens
        self.step_seconds += result.duration_seconds
        self.step_time.observe(plan, self._seconds_since_last(plan, result, now))
        self.landed_at = now if goes_on else None
        self.pace.note_step(len(plan.rows), plan.num_tokens, result.duration_seconds)
        self.num_steps_since_start = 0 if plan.num_started else self.num_steps_since_start + 1

    def _seconds_since_last(self, plan: SchedulerOutput, result: StepResult, now: float) -> float:
        """What those who ran on from the last step waited for this one; without such, what the executor took."""
        if self.landed_at is None or plan.num_running == plan.num_started:
            return result.duration_seconds
        return max(now - self.landed_at, result.duration_seconds)

    def note_end(self, request: Request) -> None:
        self.num_finished += 1
        self.num_finished_output_tokens += request.num_output_tokens
        self.output_lengths.note(request)
        self.pace.note_end(request)


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
