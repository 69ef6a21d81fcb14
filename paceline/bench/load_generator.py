"""One cell: sends a load to a target at the times it is wanted, and writes down what each request met.

The clock of a request starts when the load wanted it sent: at its arrival in an open loop, when its client became free
in a closed one, when the thinking after the turn before was over. Waiting for the cap on concurrency is part of what it
met. What only this client is guilty of, a late send or a late look at what came, is measured beside (metrics.py says
when that makes a cell invalid). While a cell runs, nothing else is done here, and the garbage collector leaves alone
what was there before.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .arrivals import Arrivals
from .call import Call
from .metrics import CellFacts
from .records import Asked, RequestRecord
from .slo import Slo
from .targets import Target, grown

LAG_TICK_SECONDS = 0.005
START_GAP_SECONDS = 0.001
Watcher = Callable[["Run"], None]
Clock = Callable[[], float]            # monotonic, seconds


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """How one cell is run. `concurrency`: clients of a closed loop, else a cap on requests under way."""

    name: str
    arrivals: Arrivals = field(default_factory=Arrivals)
    concurrency: int | None = None
    seed: int = 0
    ramp_in_seconds: float | None = None    # in which the clients of a closed loop start; None: 1 ms a client
    warm_up: Sequence[Asked] = ()      # sent before, as many at once as the cell allows, and all awaited

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.arrivals.is_closed and self.concurrency is None:
            raise ConfigError("a closed loop needs concurrency, its number of clients")
        if self.ramp_in_seconds is not None and not 0 <= self.ramp_in_seconds < math.inf:
            raise ConfigError(f"ramp_in must be at least 0 seconds, got {self.ramp_in_seconds}")
        if self.ramp_in_seconds is not None and not self.arrivals.is_closed:
            raise ConfigError(f"ramp_in has no effect on arrivals {self.arrivals.kind}; it goes with closed")



@dataclass(kw_only=True)
class CellResult:
    """Everything that was seen. `grown` is by how much the server's counters grew, warm-up excluded."""

    plan: CellPlan
    records: list[RequestRecord]
    loop_lags: list[float]
    loop_core_share: float | None      # processor time of the event loop's thread over the measured time
    grown: dict[str, int]
    zero: float                        # what the clock said at the start of the cell
    num_not_sent: int = 0
    is_interrupted: bool = False       # by Ctrl-C and the like
    is_stopped: bool = False           # by its watcher, since it had seen enough

    def facts(self, slos: Mapping[str | None, Slo] | None = None, definitions: str = "ours") -> CellFacts:
        """For metrics.summarise."""
        hits, queries = self.grown.get("prefix_cache_hits"), self.grown.get("prefix_cache_queries")
        return CellFacts(
            name=self.plan.name, arrivals=self.plan.arrivals.text(), concurrency=self.plan.concurrency,
            slos=slos or {}, definitions=definitions, loop_lags=self.loop_lags,
            loop_core_share=self.loop_core_share,
            server_cache=None if hits is None or queries is None else (hits, queries),
            server_preemptions=self.grown.get("num_preemptions"))


async def run_cell(target: Target, requests: Sequence[Asked], plan: CellPlan, watch: Watcher | None = None,
                   clock: Clock = time.perf_counter) -> CellResult:
    """Runs the warm-up and then the requests. `watch` is called after each request with the run so far, which it may
    stop. Cancelled (as by Ctrl-C), it gives back what there is, marked. Raises ConfigError before anything is sent for
    requests that the target cannot take. The clock is not the event loop's own, which uvloop rounds to milliseconds.
    """
    run = Run(target, requests, plan, watch, clock)
    try:
        await run.warm_up()
        before = await target.counters()
        await run.measure()
        run.grown = grown(before, await target.counters())
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        run.is_interrupted = True
    return run.result()


@dataclass(slots=True)
class _Ended:
    """What those who wait for a request learn."""

    at: float
    is_ok: bool


class Run:
    """A cell under way."""

    def __init__(self, target: Target, requests: Sequence[Asked], plan: CellPlan, watch: Watcher | None,
                 clock: Clock) -> None:
        self.plan = plan
        self.records: list[RequestRecord] = []
        self.num_under_way = 0
        self.num_tokens = 0
        self.is_warming_up = True
        self.is_interrupted = self.is_stopped = False
        self._work: asyncio.Future[None] | None = None
        self.grown: dict[str, int] = {}
        self.num_requests = len(requests)
        self._target = target
        self._watch = watch
        self._prepared: dict[str, Any] = {}
        for asked in (*plan.warm_up, *requests):
            if asked.request_id in self._prepared:
                raise ConfigError(f"two requests are called {asked.request_id!r}")
            self._prepared[asked.request_id] = target.prepare(asked)
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._zero = clock()
        self._core_share: float | None = None
        self._start = self._measure_start = 0.0
        self._lags: list[float] = []
        self._threads = threads_of(requests)
        self._warm_up_threads = threads_of(plan.warm_up)
        self._ended: dict[str, asyncio.Future[_Ended]] = {
            request_id: self._loop.create_future() for request_id in self._prepared}
        self._cap = _Cap(self._loop, None if plan.arrivals.is_closed else plan.concurrency)
        self._times: list[float] = []
        self._not_before: dict[str, float] = {}
        if not plan.arrivals.is_closed:
            self._times = plan.arrivals.times([thread[0].arrival_seconds for thread in self._threads], plan.seed)
        if plan.arrivals.kind == "trace":
            self._not_before = {asked.request_id: plan.arrivals.time_scale * asked.arrival_seconds
                                for asked in requests if asked.arrival_seconds is not None}

    def now(self) -> float:
        """Seconds since the cell's start."""
        return self._clock() - self._zero

    @property
    def measured_seconds(self) -> float:
        """Since the warm-up."""
        return self.now() - self._measure_start

    async def warm_up(self) -> None:
        await self._closed_loop(self._warm_up_threads, self.plan.concurrency or len(self._warm_up_threads), None)

    async def measure(self) -> None:
        self.is_warming_up = False
        self._measure_start, busy = self.now(), time.thread_time()
        with _quiet_collector():
            lag = asyncio.ensure_future(self._watch_lag())
            self._work = asyncio.ensure_future(self._load())
            try:
                await self._work
            except asyncio.CancelledError:
                if not self.is_stopped:
                    raise
            finally:
                lag.cancel()
                if self.measured_seconds > 0:
                    self._core_share = (time.thread_time() - busy) / self.measured_seconds

    def stop(self) -> None:
        """Ends the measurement early: what is under way is cut, and the rest not sent."""
        self.is_stopped = True
        if self._work is not None:
            self._work.cancel()

    async def _load(self) -> None:
        if self.plan.arrivals.is_closed:
            assert self.plan.concurrency is not None
            await self._closed_loop(self._threads, self.plan.concurrency, self.plan.ramp_in_seconds)
        else:
            await self._open_loop()

    def result(self) -> CellResult:
        num_recorded = sum(not record.is_warm_up for record in self.records)
        return CellResult(
            plan=self.plan, records=self.records, loop_lags=self._lags, loop_core_share=self._core_share,
            grown=self.grown, zero=self._zero, num_not_sent=self.num_requests - num_recorded,
            is_interrupted=self.is_interrupted, is_stopped=self.is_stopped)

    async def _closed_loop(
        self, threads: Sequence[Sequence[Asked]], num_clients: int, ramp_in_seconds: float | None
    ) -> None:
        """Each client takes the next thread when it has ended the one before. They do not begin all at once: to send
        one request takes a part of a millisecond, and a crowd that starts as one stays in step for long."""
        waiting = iter(threads)
        begin, count = self.now(), min(num_clients, len(threads))
        ramp = START_GAP_SECONDS * count if ramp_in_seconds is None else ramp_in_seconds

        async def client(free_at: float) -> None:
            await self._sleep_until(free_at)
            for thread in waiting:
                free_at = await self._follow(thread, free_at)

        await _together([client(begin + ramp * number / count) for number in range(count)])

    async def _open_loop(self) -> None:
        start = self._start = self.now()
        await _together([self._follow(thread, start + at)
                         for thread, at in zip(self._threads, self._times, strict=True)])

    async def _follow(self, thread: Sequence[Asked], start: float) -> float:
        """All requests of a thread, each as soon as it may; the time when the last of them ended."""
        if len(thread) == 1:
            await self._one(thread[0], start)
        else:
            await _together([self._one(asked, start) for asked in thread])
        return max(self._ended[asked.request_id].result().at for asked in thread)

    async def _one(self, asked: Asked, start: float) -> None:
        call = Call(clock=self.now, intended_at=start)
        try:
            before = [await self._ended[request_id] for request_id in asked.after]
            earliest = self._start + self._not_before.get(asked.request_id, 0.0)
            call.intended_at = max(earliest, start) if not before else max(
                earliest, asked.think_seconds + max(ended.at for ended in before))
            if not all(ended.is_ok for ended in before):
                call.fail("cut", f"not sent: a request that it follows ({', '.join(asked.after)}) failed")
                return
            await self._sleep_until(call.intended_at)
            await self._send(asked, call)
        finally:
            self._note(asked, call)

    async def _send(self, asked: Asked, call: Call) -> None:
        call.released_at = await self._cap.enter()
        self.num_under_way += 1
        try:
            await self._target.send(self._prepared[asked.request_id], call)
        except asyncio.CancelledError:
            why = "stopped" if self.is_stopped else "interrupted"
            call.fail("cut", f"the run was {why} after {len(call.chunk_times)} chunks of this answer")
            raise
        finally:
            if call.ended_at is None:
                call.ended_at = self.now()
            self.num_under_way -= 1
            self._cap.leave(call.ended_at)

    def _note(self, asked: Asked, call: Call) -> None:
        ended_at = self.now() if call.ended_at is None else call.ended_at
        if not self._ended[asked.request_id].done():
            self._ended[asked.request_id].set_result(_Ended(ended_at, call.status == "ok"))
        if call.sent_at is None and call.status != "cut":
            return    # interrupted before it was sent
        record = call.record(asked, self.plan.name, self.is_warming_up)
        self.records.append(record)
        if not self.is_warming_up:
            self.num_tokens += sum(record.token_counts)
        if self._watch is not None:
            self._watch(self)

    async def _sleep_until(self, at: float) -> None:
        while (left := at - self.now()) > 0:    # a timer may ring half a millisecond early
            await asyncio.sleep(left)

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + LAG_TICK_SECONDS
            await asyncio.sleep(LAG_TICK_SECONDS)
            self._lags.append(max(self._clock() - due, 0.0))


class _Cap:
    """Lets so many in at once, in order. Tells those who had to wait since when they could have gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int | None) -> None:
        self._loop = loop
        self._num_free = limit
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def enter(self) -> float | None:
        if self._num_free is None:
            return None
        if self._num_free > 0:
            self._num_free -= 1
            return None
        place = self._loop.create_future()
        self._waiting.append(place)
        return await place

    def leave(self, at: float) -> None:
        if self._num_free is None:
            return
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():    # else it was cancelled
                place.set_result(at)
                return
        self._num_free += 1


def threads_of(requests: Sequence[Asked]) -> list[list[Asked]]:
    """Requests that depend on each other, together; threads and their members in the order of the list. Raises
    ConfigError where a request follows one that does not come before it."""
    thread_of: dict[str, list[Asked]] = {}
    for asked in requests:
        merged: list[Asked] = []
        for name in asked.after:
            if name not in thread_of:
                raise ConfigError(f"{asked.request_id} follows {name!r}, which does not come before it")
            if (other := thread_of[name]) is not merged:
                merged += other
                thread_of.update((member.request_id, merged) for member in other)
        merged.append(asked)
        thread_of[asked.request_id] = merged
    threads = {id(thread): thread for thread in thread_of.values()}
    place = {asked.request_id: number for number, asked in enumerate(requests)}
    for thread in threads.values():
        thread.sort(key=lambda asked: place[asked.request_id])
    return sorted(threads.values(), key=lambda thread: place[thread[0].request_id])


async def _together(coroutines: Sequence[Any]) -> None:
    """All of them; where one fails, or this is cancelled, the others are cancelled and awaited."""
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No long pause of the garbage collector falls into a measurement: it has only what is new to look through."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
