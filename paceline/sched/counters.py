"""What the scheduler counts since start, and which computed tokens were lost and must run again."""

from __future__ import annotations

from ..kv.manager import KVCacheManager
from ..request import Request
from .outputs import EngineStats
from .plan import SchedulerOutput
from .step_time import StepTime


class Counters:
    """Counters behind EngineStats. Tokens at positions a preemption lost count as recomputed, not as prompt."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_prompt_tokens_computed = 0
        self.num_generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_recomputed_tokens = 0
        self.num_slot_steps = 0
        self.num_idle_slot_steps = 0
        self.num_padding_rows = 0
        self._num_once_computed: dict[str, int] = {}    # of requests that were preempted: positions computed before

    def looked_up(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_hit_tokens

    def lost(self, request: Request) -> None:
        """Some of what it has computed is about to be given up."""
        once = self._num_once_computed.get(request.request_id, 0)
        self._num_once_computed[request.request_id] = max(once, request.num_computed_tokens)

    def computed(self, request: Request, start: int, end: int) -> int:
        """A row ran positions [start, end). Returns how many tokens of the prompt it computed for the first time."""
        if self._num_once_computed:
            once = self._num_once_computed.get(request.request_id, 0)
            if start < once:
                self.num_recomputed_tokens += min(end, once) - start
                request.num_recomputed_tokens += min(end, once) - start
                start = min(end, once)
        num_prompt_tokens = max(min(end, len(request.prompt_token_ids)) - start, 0)
        self.num_prompt_tokens_computed += num_prompt_tokens
        return num_prompt_tokens

    def step_ran(self, plan: SchedulerOutput, num_slots: int) -> None:
        self.num_steps += 1
        if plan.rows:
            self.num_slot_steps += num_slots
        self.num_idle_slot_steps += plan.num_idle_slots
        self.num_padding_rows += len(plan.padding)

    def ended(self, request: Request) -> None:
        self._num_once_computed.pop(request.request_id, None)

    def stats(
        self, kv: KVCacheManager, step_time: StepTime, *, num_running: int, num_waiting: int
    ) -> EngineStats:
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.pool.num_cached_blocks,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_prompt_tokens_computed=self.num_prompt_tokens_computed,
            num_generation_tokens=self.num_generation_tokens,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_slot_steps=self.num_slot_steps,
            num_idle_slot_steps=self.num_idle_slot_steps,
            num_padding_rows=self.num_padding_rows,
            step_time=step_time,
        )
