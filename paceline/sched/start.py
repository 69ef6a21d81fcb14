"""Whether the head of the queue may start in this step: the limits in the order in which they are asked. Reads only."""

from __future__ import annotations

from ..kv.prefix_hash import MISS, PrefixHit
from ..request import Request
from .admission import prefill_room
from .lookback import has_unscored
from .plan import Refusal
from .policies import Policies
from .step_builder import StepBuilder
from .view import SchedulerView


def decide(
    request: Request, num_held_back: int, policies: Policies, view: SchedulerView, step: StepBuilder
) -> tuple[PrefixHit, Refusal | None]:
    """What the head finds computed, and None where it may start. num_held_back: tokens it must not run yet."""
    if not has_slot(policies, view):
        return MISS, Refusal(request.request_id, "max_num_seqs", needed=1, available=0)
    if step.budget_left == 0:
        return MISS, Refusal(request.request_id, "max_num_batched_tokens", needed=1, available=0)
    if step.scored_left == 0 and has_unscored(request):
        return MISS, Refusal(request.request_id, "max_scored_tokens", needed=1, available=0)
    hit = view.kv.look_up(request) if request.block_tables or not has_unscored(request) else MISS
    num_wanted = max(request.num_tokens - hit.num_tokens - num_held_back, 1)
    if not policies.chunking.share(view, num_wanted, step.budget_left, 0):
        return MISS, Refusal(request.request_id, "max_num_batched_tokens", num_wanted, step.budget_left)
    if _is_prefix_in_flight(request, hit, view, step):
        return MISS, Refusal(request.request_id, "prefix_in_flight", needed=1, available=0)
    return hit, prefill_room(view, request, hit) or policies.admission(view, request, hit)


def has_slot(policies: Policies, view: SchedulerView) -> bool:
    num_members = view.batch.num_members if policies.regime.keeps_slots else 0
    return max(len(view.running), num_members) < view.config.max_num_seqs


def _is_prefix_in_flight(request: Request, hit: PrefixHit, view: SchedulerView, step: StepBuilder) -> bool:
    """Another request runs the next full block of this prompt in this very step, or one before it: computing it twice
    would cost more than to wait. Each step of waiting is one of progress, and it ends with the other's prompt."""
    if request.block_tables or has_unscored(request):
        return False                                        # it would not look for it in the cache
    computing_id = view.kv.computing_next_block(request, hit)
    return computing_id is not None and step.has_row_of(computing_id)
