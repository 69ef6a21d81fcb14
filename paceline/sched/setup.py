"""What a scheduler is built from, and nothing of a model: enough to build the same one again from a journal."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """build.build_scheduler makes a Scheduler of it."""

    scheduler: SchedulerConfig
    prefix_cache: str
    num_blocks: int
    block_size: int                        # tokens
    windows: tuple[int | None, ...]        # one a KV group: tokens a query sees, itself included; None: all
    max_model_len: int                     # the model's limit, before the pool's
    eos_token_ids: frozenset[int] = frozenset()
