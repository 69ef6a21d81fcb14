"""What a running scheduler cannot be switched to. Asked before anything is swapped: a switch is whole, or it is not."""

from __future__ import annotations

from ..config import SchedulerConfig
from ..errors import ConfigError
from .chunking import check_whole_prompts_fit
from .policies import Policies


def check_switch(
    config: SchedulerConfig, policies: Policies, max_step_tokens: int | None, max_model_len: int
) -> None:
    """max_step_tokens: what the windows of the KV pool were sized for, None where it has none. Raises ConfigError."""
    if max_step_tokens is not None and config.max_num_batched_tokens > max_step_tokens:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is too many here: the windows of the "
            f"KV pool were sized for steps of {max_step_tokens} tokens when the server started")
    check_whole_prompts_fit(policies.chunking, max_step_tokens, max_model_len)
