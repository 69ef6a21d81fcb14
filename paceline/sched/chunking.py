"""How a step's token budget is split. A chunking states a step's budget, and how many tokens of a request run in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigError
from .view import SchedulerView

StepBudget: TypeAlias = Callable[[SchedulerView], int]
# (view, tokens the request could run, budget left, requests behind it that need one token each) -> tokens to run now
ShareRule: TypeAlias = Callable[[SchedulerView, int, int, int], int]

LEAST_PREFILL_TOKENS = 16    # even where no share holds the target: fewer cost hardly less, none would starve
FIRST_PREFILL_TOKENS = 32    # the most while the step-time model has seen no prompt; then twice what it has seen


@dataclass(frozen=True, slots=True)
class Chunking:
    """stalls_decode: a step runs prompts or decodes, never both; who can start or go on with its prompt comes first."""

    budget: StepBudget
    share: ShareRule
    stalls_decode: bool = False


def whole_budget(view: SchedulerView) -> int:
    return view.config.max_num_batched_tokens


def beside_decode(view: SchedulerView, num_uncomputed_tokens: int, budget_left: int, num_decodes_behind: int) -> int:
    """Prefill takes what decode leaves, both in one step; but at least one token, so the first in order progresses."""
    return min(num_uncomputed_tokens, budget_left, max(budget_left - num_decodes_behind, 1))


def all_or_nothing(view: SchedulerView, num_uncomputed_tokens: int, budget_left: int, num_decodes_behind: int) -> int:
    """A prompt runs whole; one longer than the budget alone, in a step that exceeds it, bounded by max_model_len."""
    is_first = budget_left == view.config.max_num_batched_tokens
    return num_uncomputed_tokens if is_first or num_uncomputed_tokens <= budget_left else 0


def within_target(view: SchedulerView) -> int:
    """The decodes, and the largest prefill share with which the step-time model holds itl_target_ms, a margin for what
    it does not foresee included. Without decoders nobody's tokens can come late.
    """
    most = view.config.max_num_batched_tokens
    contexts = [request.num_computed_tokens for request in view.running if request.num_uncomputed_tokens == 1]
    if not contexts:
        return most
    model, num_decodes = view.observations.step_time, len(contexts)
    target_seconds = view.config.itl_target_ms / 1e3
    seconds = target_seconds - model.margin_seconds(target_seconds)

    def share_at(context: int) -> int:
        return model.largest_prefill(seconds, num_decodes, sum(contexts), context, most)

    tried = max(2 * model.most_prefill_tokens, FIRST_PREFILL_TOKENS)
    return min(most, num_decodes + max(min(_share(view, share_at), tried), LEAST_PREFILL_TOKENS))


def _share(view: SchedulerView, share_at: Callable[[int], int]) -> int:
    """A token costs what stands before it. The first prompt under way takes the share, if it is long enough; else
    others go on or begin in the same step, and the share is what fits behind the longest context among them."""
    filling = [request for request in view.running if request.num_uncomputed_tokens > 1]
    share = share_at(filling[0].num_computed_tokens) if filling else 0
    if filling and share <= filling[0].num_uncomputed_tokens:
        return share
    head = view.waiting.head(view)
    cached = 0 if head is None else max(view.kv.look_up(head).num_tokens, head.num_computed_tokens)
    return share_at(max(cached, *(request.num_computed_tokens for request in filling), 0))


def check_whole_prompts_fit(chunking: Chunking, max_step_tokens: int | None, max_model_len: int) -> None:
    """Raises ConfigError where the pool's windows were sized for shorter steps (None: the pool has no windows)."""
    if chunking.stalls_decode and max_step_tokens is not None and max_step_tokens < max_model_len:
        raise ConfigError(f"chunking: whole prompts run up to max_model_len={max_model_len} tokens in a step; "
                          f"the windows of this KV pool were sized for {max_step_tokens}")


CHUNKINGS: Mapping[str, Chunking] = {
    "whole": Chunking(whole_budget, all_or_nothing, stalls_decode=True),
    "fixed": Chunking(whole_budget, beside_decode),
    "itl_bounded": Chunking(within_target, beside_decode),
}
