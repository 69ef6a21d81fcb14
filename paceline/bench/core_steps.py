"""What the schedule itself costs: schedule and update of a step, without a model, at sizes from one request to a crowd.

Every running request decodes; each ends after OUTPUT_TOKENS, at its own time, and the next one starts in its place with
a prompt of PROMPT_TOKENS, half of which is a prefix that the cache holds. So a step holds what steps of a busy server
hold: decode rows, one or a few prompts, look-ups, blocks taken and given back. The queue is kept at its length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ..config import SchedulerConfig
from ..request import Request, SamplingParams
from ..sched.plan import RowResult, SchedulerOutput, StepResult
from ..sched.scheduler import Scheduler
from ..sched.setup import SchedulerSetup

SIZES = ((1, 0), (1, 10_000), (32, 0), (32, 10_000), (256, 0), (256, 10_000), (1024, 0), (1024, 10_000))
BLOCK_SIZE = 16
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128
NUM_PREFIXES = 8
NUM_STEPS = 200
RAMP_STEPS = OUTPUT_TOKENS    # all prompts are in by half of it
DEFINITION = (
    "processor time of one step, median of {steps} steps: schedule_ms plans it, update_ms takes its result in; "
    "{prompt} prompt tokens, half of them cached, {output} output tokens, blocks of {block}; no model, no I/O")
MakeScheduler = Callable[[SchedulerSetup], Scheduler]


@dataclass(frozen=True, slots=True)
class Timing:
    """One size. Milliseconds of a step."""

    num_running: int
    num_waiting: int
    schedule_ms: float
    update_ms: float
    total_ms: float
    total_ms_p99: float
    add_us: float       # to queue one request, microseconds


class Crowd:
    """A scheduler kept at one size, and results for whatever it plans."""

    def __init__(
        self, make_scheduler: MakeScheduler, config: SchedulerConfig, num_running: int, num_waiting: int
    ) -> None:
        num_blocks = (num_running + 8) * (-(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE) + 1) * 2
        sized = replace(config, max_num_seqs=num_running, max_num_batched_tokens=4 * (num_running + PROMPT_TOKENS))
        self.scheduler = make_scheduler(SchedulerSetup(
            scheduler=sized, prefix_cache="hash", num_blocks=num_blocks, block_size=BLOCK_SIZE, windows=(None,),
            max_model_len=PROMPT_TOKENS + 2 * OUTPUT_TOKENS))
        self._num_running = num_running
        self._wanted = num_running + num_waiting
        self._num_unfinished = 0
        self._ids = count()
        self.now = 0.0
        self.add_seconds: list[float] = []

    def refill(self) -> None:
        while self._num_unfinished < self._wanted:
            request = self._request(next(self._ids))
            started_at = time.thread_time()
            self.scheduler.add(request)
            self.add_seconds.append(time.thread_time() - started_at)
            self._num_unfinished += 1

    def _request(self, number: int) -> Request:
        half = PROMPT_TOKENS // 2
        shared = tuple(range(half * (number % NUM_PREFIXES), half * (number % NUM_PREFIXES + 1)))
        own = tuple(range(1_000_000 + half * number, 1_000_000 + half * (number + 1)))
        # The first ones end at different times, so that later ones start a few at a time.
        num_output = 1 + number % OUTPUT_TOKENS if number < self._num_running else OUTPUT_TOKENS
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
        return Request(request_id=f"cmpl-{number:012d}", prompt_token_ids=shared + own, sampling=sampling,
                       arrival_time=float(number))

    def step(self) -> tuple[float, float]:
        """Seconds of schedule and of update."""
        self.now += 1.0
        started_at = time.thread_time()
        plan = self.scheduler.schedule(self.now)
        planned_at = time.thread_time()
        result = result_of(plan)
        resulted_at = time.thread_time()
        outputs = self.scheduler.update(plan, result, self.now)
        ended_at = time.thread_time()
        self._num_unfinished -= sum(output.finish_reason is not None for output in outputs)
        return planned_at - started_at, ended_at - resulted_at


def result_of(plan: SchedulerOutput) -> StepResult:
    rows = tuple(RowResult(row.request_id, (7,) * len(row.logits_offsets)) for row in plan.rows)
    return StepResult(plan.step_id, rows, 0.01, tuple(one.transfer_id for one in plan.transfers))


def measure(make_scheduler: MakeScheduler, config: SchedulerConfig, num_running: int, num_waiting: int,
            num_steps: int = NUM_STEPS) -> Timing:
    """One size, warmed up until requests end and start all the time."""
    crowd = Crowd(make_scheduler, config, num_running, num_waiting)
    seconds: list[tuple[float, float]] = []
    for _ in range(RAMP_STEPS + num_steps):
        crowd.refill()
        seconds.append(crowd.step())
    seconds = seconds[-num_steps:]
    in_all = sorted(1e3 * (schedule + update) for schedule, update in seconds)
    return Timing(
        num_running, num_waiting, 1e3 * statistics.median(one[0] for one in seconds),
        1e3 * statistics.median(one[1] for one in seconds), statistics.median(in_all),
        in_all[min(int(0.99 * len(in_all)), len(in_all) - 1)], 1e6 * statistics.median(crowd.add_seconds))


def definition() -> str:
    return DEFINITION.format(steps=NUM_STEPS, prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS, block=BLOCK_SIZE)


def facts(timings: list[Timing], preset: str) -> dict[str, Any]:
    return {"preset": preset, "definition": definition(),
            "sizes": [{name: getattr(one, name) for name in Timing.__slots__} for one in timings]}


def table(timings: list[Timing]) -> str:
    lines = ["running  waiting  schedule ms  update ms  both ms  p99 ms  add us"]
    lines += [f"{one.num_running:>7,}  {one.num_waiting:>7,}  {one.schedule_ms:>11.3f}  {one.update_ms:>9.3f}  "
              f"{one.total_ms:>7.3f}  {one.total_ms_p99:>6.2f}  {one.add_us:>6.1f}" for one in timings]
    return "\n".join([*lines, "", definition()])
