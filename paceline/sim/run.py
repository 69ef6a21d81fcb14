"""Drives an engine core to the end of a load, in virtual time or in real time, without a server around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..clock import Clock, VirtualClock
from ..engine.core import EngineCore
from ..engine.messages import RequestOutput, Submit
from ..errors import InvariantError

Watch: TypeAlias = Callable[[RequestOutput, float], None]    # told of every piece of news, and when it came


def ignore(output: RequestOutput, now: float) -> None:
    """Nobody watches."""


def run_arrivals(core: EngineCore, clock: VirtualClock, submits: Iterable[Submit], watch: Watch = ignore) -> None:
    """Open loop: each request is submitted at its arrival_time, or after the step under way then."""
    waiting = deque(sorted(submits, key=lambda submit: submit.arrival_time))
    while waiting or core.has_work():
        while waiting and waiting[0].arrival_time <= clock.now():
            core.add(waiting.popleft())
        pause = core.seconds_until_work()
        if pause == 0.0:
            _step(core, clock, watch)
            continue
        until = [clock.now() + pause] if pause is not None else []
        until += [waiting[0].arrival_time] if waiting else []
        clock.advance(min(until) - clock.now())


def run_closed_loop(core: EngineCore, clock: Clock, submits: Sequence[Submit], concurrency: int,
                    watch: Watch = ignore) -> None:
    """So many clients, each with one request at a time; who is done takes the next one at once. arrival_time is set to
    that moment. Needs a regime that never lets the loop idle while requests wait."""
    left = deque(submits)
    num_open = 0
    while left or num_open:
        while left and num_open < concurrency:
            core.add(replace(left.popleft(), arrival_time=clock.now()))
            num_open += 1
        if core.seconds_until_work() != 0.0:
            raise InvariantError("a closed loop met an engine that waits for more requests to come")
        num_open -= _step(core, clock, watch)


def _step(core: EngineCore, clock: Clock, watch: Watch) -> int:
    """How many requests ended."""
    outputs = core.step().outputs
    now = clock.now()
    for output in outputs:
        watch(output, now)
    return sum(output.finish_reason is not None for output in outputs)
