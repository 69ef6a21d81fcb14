"""How much may be accepted and unfinished at once, in choices and in prompt tokens, of everybody and of one tenant.

Pure bookkeeping: time comes in as `now`. A refusal says when to come again. With `missing` the amount by which the
limit would be exceeded, in its own unit, and `left` what has left that queue in the last WINDOW_SECONDS,

    Retry-After = missing / (left / seconds since the first of those leavings), rounded up, 1 to MAX_RETRY_SECONDS

and the least where nothing has left lately. Leaving counts whatever the end was: each makes room.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ServerConfig
from ..errors import Overloaded

WINDOW_SECONDS = 60.0
MAX_LEAVINGS = 1024       # of the window; beyond, the oldest are dropped
MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Of choices and prompt tokens accepted and unfinished. Choices of one prompt share its tokens. None: no limit."""

    max_choices: int
    max_tokens: int | None = None
    max_choices_per_tenant: int | None = None
    max_tokens_per_tenant: int | None = None

    @classmethod
    def of(cls, server: ServerConfig) -> QueueLimits:
        return cls(max_choices=server.max_queue, max_tokens=server.max_queue_tokens,
                   max_choices_per_tenant=server.max_queue_per_tenant,
                   max_tokens_per_tenant=server.max_queue_tokens_per_tenant)


@dataclass(frozen=True, slots=True)
class Load:
    """What one request puts on the queue, or what left it."""

    tenant: str
    num_choices: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit, and how full it is."""

    name: str              # the knob
    unit: str
    used: int
    most: int
    tenant: str | None     # None: of everybody


class QueueGate:
    """Counts the unfinished and refuses what would go beyond a limit."""

    def __init__(self, limits: QueueLimits) -> None:
        self.num_choices = 0
        self.num_tokens = 0
        self._limits = limits
        self._choices_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self._leavings: deque[tuple[float, Load]] = deque(maxlen=MAX_LEAVINGS)

    def check(self, load: Load, now: float) -> None:
        """Raises Overloaded if this does not fit now. Changes nothing."""
        for limit in self._limits_on(load.tenant):
            wanted = load.num_choices if limit.unit == "requests" else load.num_tokens
            missing = limit.used + wanted - limit.most
            if missing > 0:
                whose = "" if limit.tenant is None else "of this tenant "
                raise Overloaded(
                    f"the queue is full: {limit.used} {limit.unit} {whose}are unfinished, {wanted} more would exceed "
                    f"{limit.name} ({limit.most})", self._retry_after_seconds(limit, missing, now), limit.name)

    def check_any(self, now: float) -> None:
        """Raises Overloaded if not even the smallest request of a new tenant fits."""
        self.check(Load("", 1, 1), now)

    def enter(self, load: Load) -> None:
        self._add(load, 1)

    def leave(self, load: Load, now: float) -> None:
        """Part or all of what entered has ended."""
        self._add(load, -1)
        self._leavings.append((now, load))

    def _add(self, load: Load, sign: int) -> None:
        self.num_choices += sign * load.num_choices
        self.num_tokens += sign * load.num_tokens
        for counts, amount in ((self._choices_of, load.num_choices), (self._tokens_of, load.num_tokens)):
            counts[load.tenant] += sign * amount
            if not counts[load.tenant]:
                del counts[load.tenant]    # tenants come and go: nobody is remembered

    def _limits_on(self, tenant: str) -> Iterator[_Limit]:
        limits = self._limits
        yield _Limit("max_queue", "requests", self.num_choices, limits.max_choices, None)
        if limits.max_tokens is not None:
            yield _Limit("max_queue_tokens", "tokens", self.num_tokens, limits.max_tokens, None)
        if limits.max_choices_per_tenant is not None:
            yield _Limit("max_queue_per_tenant", "requests", self._choices_of[tenant],
                         limits.max_choices_per_tenant, tenant)
        if limits.max_tokens_per_tenant is not None:
            yield _Limit("max_queue_tokens_per_tenant", "tokens", self._tokens_of[tenant],
                         limits.max_tokens_per_tenant, tenant)

    def _retry_after_seconds(self, limit: _Limit, missing: int, now: float) -> int:
        recent = [(at, load) for at, load in self._leavings
                  if now - at <= WINDOW_SECONDS and limit.tenant in (None, load.tenant)]
        num_left = sum(load.num_choices if limit.unit == "requests" else load.num_tokens for _, load in recent)
        if not num_left:
            return 1
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(missing * (now - recent[0][0]) / num_left)))
