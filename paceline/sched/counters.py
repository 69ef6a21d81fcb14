"""What the scheduler counts since start, and which computed tokens were lost and must run again."""

from __future__ import annotations

from ..request import Request


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
        self._num_once_computed: dict[str, int] = {}    # of requests that were preempted: positions computed before

    def looked_up(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_hit_tokens

    def preempted(self, request: Request) -> None:
        once = self._num_once_computed.get(request.request_id, 0)
        self._num_once_computed[request.request_id] = max(once, request.num_computed_tokens)
        self.num_preemptions += 1

    def computed(self, request: Request, start: int, end: int) -> None:
        """A row ran positions [start, end)."""
        if self._num_once_computed:
            once = self._num_once_computed.get(request.request_id, 0)
            if start < once:
                self.num_recomputed_tokens += min(end, once) - start
                start = min(end, once)
        self.num_prompt_tokens_computed += max(min(end, request.num_prompt_tokens) - start, 0)

    def ended(self, request: Request) -> None:
        self._num_once_computed.pop(request.request_id, None)
