"""Who is refused, by which limit, and when to come again. Time is handed in."""

from __future__ import annotations

import pytest

from paceline.engine.queue_limits import MAX_RETRY_SECONDS, WINDOW_SECONDS, Load, QueueGate, QueueLimits
from paceline.errors import Overloaded


def load(num_choices: int = 1, num_tokens: int = 10, tenant: str = "a") -> Load:
    return Load(tenant, num_choices, num_tokens)


def refused(gate: QueueGate, asked: Load, now: float = 0.0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        gate.check(asked, now)
    return caught.value


def test_each_limit_says_its_name_and_its_numbers() -> None:
    gate = QueueGate(QueueLimits(max_choices=10, max_tokens=100, max_choices_per_tenant=4, max_tokens_per_tenant=50))
    gate.enter(load(3, 40))
    gate.enter(load(2, 30, "b"))
    assert refused(gate, load(6, 1, "c")).limit == "max_queue"
    assert refused(gate, load(1, 31, "c")).limit == "max_queue_tokens"
    assert refused(gate, load(2, 1)).limit == "max_queue_per_tenant"
    error = refused(gate, load(1, 11))
    assert error.limit == "max_queue_tokens_per_tenant"
    assert "40 tokens of this tenant are unfinished, 11 more would exceed" in str(error)
    assert "max_queue_tokens_per_tenant (50)" in str(error)
    gate.check(load(1, 10), 0.0)       # what fits every limit exactly is let in
    gate.check(load(4, 30, "c"), 0.0)


def test_what_has_left_makes_room_and_tenants_are_forgotten() -> None:
    gate = QueueGate(QueueLimits(max_choices=2, max_choices_per_tenant=2))
    gate.enter(load(2))
    refused(gate, load())
    gate.leave(load(1, 0), 1.0)
    gate.check(load(), 1.0)
    gate.leave(load(1, 10), 2.0)
    assert (gate.num_choices, gate.num_tokens) == (0, 0)
    assert not gate._choices_of and not gate._tokens_of


def test_the_time_to_come_back_follows_the_rate_at_which_places_come_free() -> None:
    gate = QueueGate(QueueLimits(max_choices=8))
    gate.enter(load(8))
    assert refused(gate, load()).retry_after_seconds == 1    # nothing has left yet: the least
    for second in range(4):                                  # one choice every two seconds
        gate.leave(load(1, 0), 2.0 * second)
        gate.enter(load(1, 0))
    # Four left in the eight seconds since the first did: two seconds a place.
    assert refused(gate, load(1), now=8.0).retry_after_seconds == 2
    assert refused(gate, load(5), now=8.0).retry_after_seconds == 10
    assert refused(gate, load(8), now=1000.0).retry_after_seconds == 1    # that was too long ago to say anything
    assert refused(gate, load(500), now=8.0).retry_after_seconds == MAX_RETRY_SECONDS


def test_the_rate_is_measured_in_the_unit_of_the_limit_that_said_no() -> None:
    gate = QueueGate(QueueLimits(max_choices=100, max_tokens=1000))
    gate.enter(load(1, 1000))
    gate.leave(load(1, 300), 0.0)
    gate.enter(load(1, 300))
    assert refused(gate, load(1, 600), now=10.0).retry_after_seconds == 20    # 30 tokens a second


def test_a_tenants_own_limit_looks_at_what_that_tenant_finished() -> None:
    gate = QueueGate(QueueLimits(max_choices=100, max_choices_per_tenant=1))
    gate.enter(load(1, 0, "slow"))
    gate.enter(load(1, 0, "quick"))
    for second in range(10):
        gate.leave(load(1, 0, "quick"), float(second))
        gate.enter(load(1, 0, "quick"))
    gate.leave(load(1, 0, "slow"), 0.0)
    gate.enter(load(1, 0, "slow"))
    assert refused(gate, load(1, 0, "quick"), now=10.0).retry_after_seconds == 1
    assert refused(gate, load(1, 0, "slow"), now=10.0).retry_after_seconds == 10


def test_only_the_last_minute_counts() -> None:
    gate = QueueGate(QueueLimits(max_choices=2))
    gate.enter(load(2))
    gate.leave(load(1, 0), 0.0)
    gate.enter(load(1, 0))
    gate.leave(load(1, 0), 2 * WINDOW_SECONDS)
    gate.enter(load(1, 0))
    assert refused(gate, load(1), now=2 * WINDOW_SECONDS + 3).retry_after_seconds == 3
