"""What past steps showed of requests: how long outputs get, and how much service each tenant had. Changed in
`Scheduler.update` only."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import SchedulerConfig
from ..request import Request
from .recent import Recent

MOST_CLASSES = 256       # kinds of requests whose lengths are remembered apart
MOST_LENGTHS = 256       # lengths remembered of each
FEWEST_LENGTHS = 8       # fewer say nothing
NEWEST_COUNTS = 8        # a running mean moves by this part of the difference
MOST_TENANTS = 4096      # counters kept before those that say nothing are dropped

ClassName = tuple[str, int]
ALL: ClassName = ("", -1)    # the class of all; no max_tokens falls into its bucket


class OutputLengths:
    """Output lengths of requests that ended by themselves or at their limit, by tenant and size of max_tokens."""

    def __init__(self) -> None:
        self._recent: dict[ClassName, Recent[int]] = {ALL: Recent(MOST_LENGTHS)}

    def note(self, request: Request) -> None:
        name = _class_of(request)
        recent = self._recent.pop(name, None) or Recent(MOST_LENGTHS)
        self._recent[name] = recent    # the one seen last is last
        if len(self._recent) > MOST_CLASSES:
            del self._recent[next(name for name in self._recent if name != ALL)]
        for lengths in (recent, self._recent[ALL]):
            lengths.add(request.num_output_tokens)

    def expected(self, request: Request, fraction: float) -> int | None:
        """The output length that this share of such requests does not exceed, among those that got as far as this one.

        Of its class, or of all requests where its class has shown too few; None where nothing can be said.
        """
        for name in (_class_of(request), ALL):
            recent = self._recent.get(name)
            if recent is None or len(recent) < FEWEST_LENGTHS:
                continue
            length = recent.quantile_beyond(request.num_output_tokens, fraction)
            if length is not None:
                return length
        return None


def _class_of(request: Request) -> ClassName:
    return (request.tenant, request.sampling.max_tokens.bit_length())


class Pace:
    """Seconds that things took lately: means in which the newest counts one eighth. 0: never seen."""

    def __init__(self) -> None:
        self.decode_step_seconds = 0.0       # a step in which every row ran one token
        self.prefill_token_seconds = 0.0     # a step with a prompt in it, over its tokens
        self.request_seconds = 0.0           # a request, from its first start to its end

    def note_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        if num_tokens > num_rows:
            self.prefill_token_seconds = _mean(self.prefill_token_seconds, seconds / num_tokens)
        elif num_rows:
            self.decode_step_seconds = _mean(self.decode_step_seconds, seconds)

    def note_end(self, request: Request) -> None:
        if request.finished_at is not None and request.first_scheduled_at is not None:
            self.request_seconds = _mean(self.request_seconds, request.finished_at - request.first_scheduled_at)


def _mean(before: float, newest: float) -> float:
    return before + (newest - before) / NEWEST_COUNTS if before else newest


class TenantService:
    """Weighted tokens that each tenant was served, the counters of a virtual token counter scheduler (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024).

    `level` is the least counter among the tenants that wait. One that had nothing to run counts as having been served
    that much, so idling earns no credit. A counter below the level says nothing and may be forgotten.
    """

    def __init__(self) -> None:
        self.level = 0.0
        self._served: dict[str, float] = {}

    def of(self, tenant: str) -> float:
        """Never falls while there is work."""
        return max(self._served.get(tenant, 0.0), self.level)

    def charge(self, request: Request, num_input_tokens: int, num_output_tokens: int, config: SchedulerConfig) -> None:
        tokens = num_input_tokens * config.fair_input_weight + num_output_tokens * config.fair_output_weight
        self._served[request.tenant] = self.of(request.tenant) + tokens / config.weight_of_tenant(request.tenant)

    def settle(self, waiting_tenant: str | None, running: Iterable[Request]) -> None:
        """After a step, with the least served tenant that waits. An engine without work starts anew."""
        tenants = {request.tenant for request in running} if waiting_tenant is None else {waiting_tenant}
        if not tenants:
            self.level = 0.0
            self._served.clear()
            return
        self.level = max(self.level, min(self.of(tenant) for tenant in tenants))
        if len(self._served) > MOST_TENANTS:
            self._served = {tenant: served for tenant, served in self._served.items() if served > self.level}
