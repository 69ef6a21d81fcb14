"""What must be free before a request starts. A rule answers None (start) or a Refusal naming the limit that said no.

Where nobody runs every rule lets a request start that fits the pool, so none waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import TypeAlias

from ..kv.prefix_hash import PrefixHit
from ..request import Request
from .plan import Refusal
from .view import SchedulerView

AdmissionRule: TypeAlias = Callable[[SchedulerView, Request, PrefixHit], Refusal | None]
LengthOf: TypeAlias = Callable[[SchedulerView, Request], int]    # tokens that a request is counted on to reach


def watermark(view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
    """Blocks for every token known now, and a margin left for the running ones to grow into."""
    # Alone there is nobody to leave a margin for, and a request that just fits must not wait for ever.
    num_margin = ceil(view.config.watermark * view.kv.num_blocks) if view.running else 0
    num_needed = view.kv.num_blocks_to_start(request, hit)
    num_available = max(view.kv.num_free_blocks - num_margin, 0)
    if num_needed <= num_available:
        return None
    return Refusal(request.request_id, "num_kv_blocks", num_needed, num_available)


def reserve(view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
    """Blocks up to max_tokens, for all of a request's choices, beside what those who run may yet take up to theirs.

    Whoever starts under this rule is never preempted, because free blocks cover all growth at any time: a block taken
    lowers both sides by one, and an end lowers the growth. (Of requests from before a switch of policies that may not
    hold; nobody starts until it does.) Choices that do not fit the pool all at once start one by one.
    """
    return _room_to_grow(view, request, hit, _longest)


def overcommit(view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
    """Like reserve, but counts on lengths that overcommit_quantile of like requests did not exceed.

    Like are those of the same tenant, with max_tokens between the same powers of two, that got as far as this one; or
    all requests, where fewer than 8 such have ended. Until 8 of any kind have, and for one that outgrew all of them, it
    reserves. Conditional lengths are the idea of "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS
    2025), which looks at each point of time where we add up the ends.
    """
    return _room_to_grow(view, request, hit, _likely)


def _longest(view: SchedulerView, request: Request) -> int:
    return min(request.num_prompt_tokens + request.sampling.max_tokens, view.max_model_len)


def _likely(view: SchedulerView, request: Request) -> int:
    length = view.observations.output_lengths.expected(request, view.config.overcommit_quantile)
    longest = _longest(view, request)
    return longest if length is None else min(request.num_prompt_tokens + length, longest)


def _room_to_grow(view: SchedulerView, request: Request, hit: PrefixHit, length_of: LengthOf) -> Refusal | None:
    num_needed = view.kv.num_blocks_to_reach(request, hit, length_of(view, request))
    num_promised = view.kv.num_blocks_to_grow(
        (running, length_of(view, running)) for running in view.running)
    num_available = view.kv.num_free_blocks - num_promised
    if num_needed <= num_available:
        return None
    return Refusal(request.request_id, "num_kv_blocks", num_needed, max(num_available, 0))


def prefill_room(view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
    """max_batch_prefill_tokens, which holds beside any admission rule. One request may always be prefilled."""
    limit = view.config.max_batch_prefill_tokens
    if limit is None:
        return None
    num_under_way = sum(running.num_uncomputed_tokens for running in view.running if running.num_uncomputed_tokens > 1)
    num_needed = request.num_tokens - hit.num_tokens
    if not num_under_way or num_under_way + num_needed <= limit:
        return None
    return Refusal(request.request_id, "max_batch_prefill_tokens", num_needed, max(limit - num_under_way, 0))


ASSURING_ADMISSIONS: frozenset[str] = frozenset({"reserve"})    # whoever they let in never runs out of blocks
ADMISSIONS: Mapping[str, AdmissionRule] = {rule.__name__: rule for rule in (watermark, reserve, overcommit)}
