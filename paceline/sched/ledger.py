"""What waiting and memory cost, by tenant: seconds waited by what held the queue, and blocks held times seconds.

Nobody passes the head of the queue, so the limit that refused the head holds everybody who waits. Time is booked when
somebody brings a `now`: all since the last one goes to what that plan decided. Who enters in between is booked from its
own moment on, so that a tenant's seconds add up to those its requests really waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..kv.manager import KVCacheManager
from ..request import Request
from .plan import Refusal, SchedulerOutput
from .reports import Ended

STEP = "step"                  # nothing holds the queue: who comes in waits for the step that runs
PREEMPTION = "preemption"      # blocks were so short that somebody yielded; nobody starts in such a step
PREFILL, DECODE = "prefill", "decode"
OTHER = "other"                # all tenants beyond the first MAX_TENANTS
MAX_TENANTS = 32
PUBLISH_SECONDS = 1.0          # between two totals, while there is work
NUM_DEPARTURES, LEAST_DEPARTURES = 32, 4    # that a rate is measured from


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """Since start, in order of first booking."""

    queue_seconds: tuple[tuple[str, str, float], ...]    # tenant, cause, seconds of all its requests together
    block_seconds: tuple[tuple[str, str, float], ...]    # tenant, phase, blocks times seconds


@dataclass(frozen=True, slots=True)
class QueueHold:
    """What holds the queue since when; the refusal, where a limit refused the head."""

    cause: str
    since: float
    refusal: Refusal | None


class Ledger:
    """The scheduler's; the wait queue tells who enters and leaves."""

    def __init__(self, kv: KVCacheManager, running: Sequence[Request]) -> None:
        """running: the scheduler's own list, as it changes."""
        self.hold = QueueHold(STEP, 0.0, None)
        self.queued_at: dict[str, float] = {}               # of those who wait
        self.ended = Ended()
        self._kv, self._running = kv, running
        self._now = 0.0
        self._published_at: float | None = None
        self._accounts: dict[str, str] = {}                 # tenant -> the name its seconds are booked under
        self._num_waiting: dict[str, int] = {}
        self._unbooked: dict[str, float] = {}               # seconds before now that _num_waiting does not tell
        self._num_blocks: dict[tuple[str, str], int] = {}
        self._queue_seconds: dict[tuple[str, str], float] = {}
        self._block_seconds: dict[tuple[str, str], float] = {}
        self._held_seconds = 0.0                            # time in which something held the queue
        self._departures: deque[float] = deque(maxlen=NUM_DEPARTURES)    # by that clock

    # --- the wait queue tells

    def entered(self, request: Request, now: float) -> None:
        account = self._account(request.tenant)
        self.queued_at[request.request_id] = now
        self._num_waiting[account] = self._num_waiting.get(account, 0) + 1
        self._unbooked[account] = self._unbooked.get(account, 0.0) + self._now - now

    def left(self, request: Request) -> None:
        account = self._account(request.tenant)
        del self.queued_at[request.request_id]
        self._num_waiting[account] -= 1
        if self.hold.cause != STEP:
            self._departures.append(self._held_seconds)

    # --- the scheduler tells

    def pass_time(self, now: float) -> None:
        """Books what went by."""
        seconds, self._now = now - self._now, now
        cause = self.hold.cause
        for account, num_waiting in self._num_waiting.items():
            waited = num_waiting * seconds + self._unbooked.pop(account, 0.0)
            if waited:
                self._queue_seconds[account, cause] = self._queue_seconds.get((account, cause), 0.0) + waited
        if cause != STEP:
            self._held_seconds += seconds
        for key, num_blocks in self._num_blocks.items() if self._running else ():
            self._block_seconds[key] = self._block_seconds.get(key, 0.0) + num_blocks * seconds

    def planned(self, plan: SchedulerOutput, is_short_of_blocks: bool) -> None:
        """From here on this plan holds the queue, and those who run the blocks they have now."""
        cause = plan.refusal.limit if plan.refusal is not None else PREEMPTION if is_short_of_blocks else STEP
        since = self.hold.since if cause == self.hold.cause else self._now
        self.hold = QueueHold(cause, since, plan.refusal)
        self._num_blocks = self._blocks_held()

    def _blocks_held(self) -> dict[tuple[str, str], int]:
        """A block that several share counts for each."""
        held: dict[tuple[str, str], int] = {}
        for request in self._running:
            key = (self._account(request.tenant), DECODE if request.output_token_ids else PREFILL)
            held[key] = held.get(key, 0) + self._kv.num_blocks_held(request)
        return held

    # --- anybody asks

    def seconds_until_start(self, position: int) -> float | None:
        """Of who stands there, if the queue moves on as it lately did while something held it; None: too little was
        seen. A queue that has stood still for longer than between two departures counts as slower."""
        if len(self._departures) < LEAST_DEPARTURES:
            return None
        first, last = self._departures[0], self._departures[-1]
        gap = (last - first) / (len(self._departures) - 1)
        since_last = self._held_seconds - last
        gap += max(since_last - gap, 0.0) / (len(self._departures) - 1)
        return (position + 1) * gap - min(since_last, gap)

    def totals(self) -> LedgerTotals:
        return LedgerTotals(tuple((*key, seconds) for key, seconds in self._queue_seconds.items()),
                            tuple((*key, seconds) for key, seconds in self._block_seconds.items()))

    def totals_if_due(self, is_idle: bool) -> LedgerTotals | None:
        """Now and then while there is work, and when there is none: a step need not carry them all."""
        if not is_idle and self._published_at is not None and self._now - self._published_at < PUBLISH_SECONDS:
            return None
        self._published_at = self._now
        return self.totals()

    def _account(self, tenant: str) -> str:
        account = self._accounts.get(tenant)
        if account is not None:
            return account
        if len(self._accounts) >= MAX_TENANTS:
            return OTHER
        self._accounts[tenant] = tenant
        return tenant
