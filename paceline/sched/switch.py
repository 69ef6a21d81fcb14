"""What a running scheduler cannot be switched to. Asked before anything is swapped: a switch is whole, or it is not."""

from __future__ import annotations

from ..config import SchedulerConfig
from ..errors import ConfigError
from .chunking import check_whole_prompts_fit
from .policies import Policies
from .preemption import never
from .view import SchedulerView


def check_switch(
    config: SchedulerConfig, policies: Policies, max_step_tokens: int | None, view: SchedulerView
) -> None:
    """max_step_tokens: what the windows of the KV pool were sized for, None where it has none. Raises ConfigError."""
    if max_step_tokens is not None and config.max_num_batched_tokens > max_step_tokens:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is too many here: the windows of the "
            f"KV pool were sized for steps of {max_step_tokens} tokens when the server started")
    check_whole_prompts_fit(policies.chunking, max_step_tokens, view.max_model_len)
    if policies.preemption is never:
        _check_nobody_must_yield(view)


def _check_nobody_must_yield(view: SchedulerView) -> None:
    """Without preemption those who run must all reach their ends side by side, or they would wait for each other."""
    num_needed = view.kv.num_blocks_to_grow(
        (request, min(request.num_prompt_tokens + request.sampling.max_tokens, view.max_model_len))
        for request in view.running)
    if num_needed > view.kv.num_free_blocks:
        raise ConfigError(
            f"preemption='never' cannot begin now: those who run may need {num_needed} more blocks, and "
            f"{view.kv.num_free_blocks} are free; switch the admission first, and this when some have ended")
