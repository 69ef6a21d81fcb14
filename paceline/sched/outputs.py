"""What a step brought: news of single requests, and the gauges and counters of the scheduler. Plain frozen values.

They live here because the scheduler makes them; `engine/messages` hands them through the engine's door.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..request import FinishReason, Request, StopMatch
from .flat import pickled_flat
from .plan import RowResult, ScoredToken, TopLogprobs
from .step_time import UNKNOWN, StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """When things happened to one request, in seconds on the engine's clock."""

    arrived_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    finished_at: float
    num_preemptions: int


@pickled_flat
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step brought to one choice. `timeline` comes with the finish.

    prompt_logprobs, where asked for, come in order with choice 0, in one or more pieces, the last not later than the
    first token of any choice; the prompt's first token has none and is left out.
    """

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    prompt_logprobs: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop: StopMatch | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None


@pickled_flat
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
    num_slot_steps: int = 0          # max_num_seqs for each step that ran a row
    num_idle_slot_steps: int = 0     # of those, slots without a row
    num_padding_rows: int = 0        # rows of finished members that static_padded ran
    step_time: StepTime = UNKNOWN


def output_of(request: Request, result: RowResult | None = None) -> RequestOutput:
    """News of a request as it stands, with what a row brought it; a finished one has its reason and its timeline."""
    return RequestOutput(
        request_id=request.request_id,
        choice_index=request.choice_index,
        token_ids=() if result is None else result.token_ids,
        logprobs=None if result is None else result.logprobs,
        top_logprobs=None if result is None else result.top_logprobs,
        prompt_logprobs=() if result is None else result.scored,
        finish_reason=request.finish_reason,
        stop=request.stop,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        timeline=None if request.finished_at is None else timeline_of(request, request.finished_at),
    )


def timeline_of(request: Request, finished_at: float) -> RequestTimeline:
    return RequestTimeline(
        arrived_at=request.arrival_time,
        first_scheduled_at=request.first_scheduled_at,
        first_token_at=request.first_token_at,
        finished_at=finished_at,
        num_preemptions=request.num_preemptions,
    )


def ended_before_birth(
    parent: Request, request_id: str, choice_index: int, reason: FinishReason, now: float
) -> RequestOutput:
    """The end of a choice whose parent was still computing the prompt."""
    return RequestOutput(
        request_id=request_id,
        choice_index=choice_index,
        token_ids=(),
        finish_reason=reason,
        num_prompt_tokens=parent.num_prompt_tokens,
        num_cached_tokens=parent.num_cached_tokens,
        timeline=timeline_of(parent, now),
    )
