"""The engine's door: plain values in, plain values out. Both transports (thread, process) carry exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..request import FinishReason, SamplingParams, StopMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run this prompt. With num_choices > 1 choice i reports under `f"{request_id}:{i}"`, choice 0 under request_id."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    cache_extras: tuple[str, ...] = ()
    prompt_index: int = 0
    num_choices: int = 1
    program_id: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests and all their choices. Unknown and finished ids are no error."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop. `is_graceful`: first finish what was submitted."""

    is_graceful: bool


Message: TypeAlias = Submit | Abort | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """When things happened to one request, in seconds on the engine's clock."""

    arrived_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    finished_at: float
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step brought to one choice. `timeline` comes with the finish."""

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    stop: StopMatch | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges after a step and counters since start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int             # free or cached: can be given out
    num_cached_blocks: int           # of the free ones, how many still hold a reusable prefix
    num_preemptions: int             # counters from here on
    num_steps: int
    num_prompt_tokens_computed: int
    num_generation_tokens: int
    prefix_cache_queries: int        # tokens
    prefix_cache_hits: int           # tokens
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """One step's news. `step_num_tokens` and `step_duration_seconds` describe the step itself."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    step_num_tokens: int = 0
    step_duration_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Died:
    """The loop has stopped on an exception; no more Outputs will come."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop has left as asked."""


News: TypeAlias = Outputs | Died | Stopped
