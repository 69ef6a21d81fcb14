"""What other policies would have planned with a journal's arrivals, lengths and step times. Not a measurement.

The rule. Requests arrive, and clients leave, at the recorded times. A choice generates as many tokens as it did, and
stops where it stopped; one whose client left goes on until that time. A step takes the median time of the journal's
steps with the same composition (decode rows, tokens of all other rows); a composition that the journal lacks takes what
a plane a + b * decode rows + c * other tokens, fitted to all of its steps by least squares, gives there, but never less
than the fastest step. A step without rows takes a millisecond. The time between steps is not counted. What that rule
makes of the journal's own policies stands beside, so that its error is seen before its prediction is believed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median
from typing import Any

import numpy as np

from ..errors import EngineError, RequestError
from ..request import StopMatch
from ..sched.outputs import RequestOutput, RequestTimeline
from ..sched.plan import RowResult, ScheduledRequest, SchedulerOutput, ScoredToken, StepResult
from ..sched.scheduler import Scheduler
from ..sched.setup import SchedulerSetup
from .core import request_of
from .journal_file import at_line
from .journal_lines import NO_ROWS, Line, fixed, rows_of, submit_of
from .journal_summary import percentile
from .replay import FILLER, Journaled, MakeScheduler, StandIns, stand_in

EMPTY_STEP_SECONDS = 0.001
CUT_SHORT = ("abort", "timeout")    # ends that say nothing of how long the answer would have been
MAX_EMPTY_STEPS = 1_000_000    # without anything to come: these policies would wait for ever
UNKNOWN = FILLER - 1 - (1 << 62)    # from here down: tokens that complete a block the journal does not know
RULE = ("recorded arrivals and output lengths; a step takes the median time of the journal's steps with as many decode "
        "rows and other tokens, or what a plane fitted to them gives")


@dataclass
class Script:
    """What one choice generated in the journal."""

    num_tokens: int = 0
    ends: bool = True                                            # after these tokens; False: its client left first
    hash_of: dict[int, str] = field(default_factory=dict)        # by how many tokens of it were known with the block


@dataclass(frozen=True, slots=True)
class Input:
    """A request that arrives, or clients that leave."""

    at: float
    request: Line | None
    aborted_ids: tuple[str, ...] = ()


class StepTimes:
    """Seconds of a step by its composition; see the rule above."""

    def __init__(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """steps: decode rows, other tokens, seconds. Raises EngineError where there are none."""
        known = [step for step in steps if step[0] or step[1]]
        if not known:
            raise EngineError("the journal holds no step to take times from")
        by_composition: dict[tuple[int, int], list[float]] = {}
        for num_decodes, num_others, seconds in known:
            by_composition.setdefault((num_decodes, num_others), []).append(seconds)
        self._medians = {composition: median(times) for composition, times in by_composition.items()}
        self._least = min(seconds for *_, seconds in known)
        columns = np.array([(1.0, num_decodes, num_others) for num_decodes, num_others, _ in known])
        self._plane = np.linalg.lstsq(columns, np.array([step[2] for step in known]), rcond=None)[0]

    def of(self, plan: SchedulerOutput) -> float:
        if not plan.all_rows:
            return EMPTY_STEP_SECONDS
        composition = composed([len(row.token_ids) for row in plan.all_rows])
        exact = self._medians.get(composition)
        return exact if exact is not None else max(float(self._plane @ (1.0, *composition)), self._least)


def composed(num_tokens: Iterable[int]) -> tuple[int, int]:
    """Rows of one token, and the tokens of all other rows."""
    counts = list(num_tokens)
    num_decodes = sum(1 for count in counts if count == 1)
    return num_decodes, sum(counts) - num_decodes


class Scripted:
    """A journal as the inputs of another schedule."""

    def __init__(self, journaled: Journaled) -> None:
        self.inputs: list[Input] = []
        self.ends: list[Line] = []
        self.scripts: dict[str, Script] = {}
        self.num_preemptions = self.num_steps = 0
        self.first_step_at = 0.0
        self._known: dict[str, int] = {}    # tokens by choice
        self._block_size = journaled.setup.block_size
        steps: list[tuple[int, int, float]] = []
        for number, line in journaled.lines:
            with at_line(journaled.path, number):
                if line["event"] == "step":
                    padding = line["plan"].get("padding", NO_ROWS)
                    num_tokens = rows_of(line["plan"])["num_tokens"] + padding["num_tokens"]
                    steps.append((*composed(num_tokens), line["until"] - line["at"]))
                    self._step(line)
                self._take(line)
        self.times = StepTimes(steps)

    def _take(self, line: Line) -> None:
        if line["event"] == "add":
            self.inputs.append(Input(line["at"], line["request"]))
            self._known[line["request"]["request_id"]] = line["request"]["num_prompt_tokens"]
        elif line["event"] == "abort":
            self.inputs.append(Input(line["at"], None, tuple(line["request_ids"])))
        elif line["event"] == "fork":
            raise EngineError("a journal with forks made through the library cannot be replayed under other policies")
        for end in line.get("ended", ()):
            self.ends.append(end)
            self.script(end["request_id"]).ends = end["finish_reason"] not in CUT_SHORT

    def _step(self, line: Line) -> None:
        if not self.num_steps:
            self.first_step_at = line["at"]
        self.num_steps += 1
        self.num_preemptions += len(line["plan"].get("preempted", ()))
        for request_id, recorded in zip(rows_of(line["plan"])["request_id"], line["result"]["rows"], strict=True):
            entry, script = fixed(recorded), self.script(request_id)
            known = self._known.get(request_id, self._known.get(request_id.rpartition(":")[0], 0)) + script.num_tokens
            first_end = known + (-known % self._block_size or self._block_size)
            for index, block_hash in enumerate(entry.get("block_hashes", ())):
                script.hash_of[first_end + index * self._block_size] = block_hash
            script.num_tokens += entry["num_tokens"]

    def script(self, request_id: str) -> Script:
        return self.scripts.setdefault(request_id, Script())


class Rehearsal:
    """One schedule run over a script in the time that the rule gives."""

    def __init__(self, script: Scripted, scheduler: Scheduler, block_size: int) -> None:
        self._script = script
        self._scheduler = scheduler
        self._block_size = block_size
        self._stand_ins = StandIns(block_size)
        self._num_generated: dict[str, int] = {}
        self._num_unknown = 0
        self.ends: list[RequestOutput] = []
        self.num_refused = self.num_steps = self.num_preemptions = 0

    def run(self) -> Rehearsal:
        inputs = deque(self._script.inputs)
        now, num_idle = self._script.first_step_at, 0
        while inputs or self._scheduler.has_work():
            if inputs and not self._scheduler.has_work():
                now = max(now, inputs[0].at)
            while inputs and inputs[0].at <= now:
                self._feed(inputs.popleft())
            self.ends += self._scheduler.expire(now)
            if (idle_until := self._scheduler.idle_until(now)) is not None:    # the regime waits for its batch to fill
                now = min([idle_until, *(one.at for one in islice(inputs, 1))])
            elif self._scheduler.has_work():
                plan, now = self._step(now)
                num_idle = 0 if plan.rows or inputs else num_idle + 1
                if num_idle > MAX_EMPTY_STEPS:
                    raise EngineError("these policies wait for something that never comes")
        return self

    def _feed(self, one: Input) -> None:
        if one.request is None:
            self.ends += self._scheduler.abort(one.aborted_ids, one.at)
            return
        try:
            self._scheduler.add(request_of(submit_of(one.request, self._stand_ins.prompt(one.request))))
        except RequestError:
            self.num_refused += 1

    def _step(self, now: float) -> tuple[SchedulerOutput, float]:
        plan = self._scheduler.schedule(now)
        seconds = self._script.times.of(plan)
        result = StepResult(plan.step_id, tuple(self._result(row) for row in plan.rows), seconds,
                            tuple(transfer.transfer_id for transfer in plan.transfers))
        outputs = self._scheduler.update(plan, result, now + seconds)
        self.ends += [output for output in outputs if output.finish_reason is not None]
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        return plan, now + seconds

    def _result(self, row: ScheduledRequest) -> RowResult:
        scored = (ScoredToken(FILLER, 0.0),) * row.num_scored
        if not row.logits_offsets:
            return RowResult(row.request_id, scored=scored)
        script = self._script.script(row.request_id)
        num_before = self._num_generated.get(row.request_id, 0)
        if script.ends and num_before >= script.num_tokens:    # stopped by its first token's text, or failed
            return RowResult(row.request_id, stop=StopMatch(), scored=scored)
        self._num_generated[row.request_id] = num_before + 1
        num_known = row.num_computed_tokens + len(row.token_ids) + 1
        is_last = script.ends and num_before + 1 == script.num_tokens
        stop = StopMatch() if is_last else None
        return RowResult(row.request_id, (self._token(script, num_known),), stop=stop, scored=scored)

    def _token(self, script: Script, num_known: int) -> int:
        if num_known % self._block_size:
            return FILLER
        if (block_hash := script.hash_of.get(num_known)) is not None:
            return stand_in(block_hash)
        self._num_unknown += 1
        return UNKNOWN - self._num_unknown


def compare(journaled: Journaled, other: SchedulerSetup, make_scheduler: MakeScheduler) -> dict[str, dict[str, Any]]:
    """The journal as it was, its own policies by the rule, and the others by the rule, as columns of one table."""
    script = Scripted(journaled)
    own = Rehearsal(script, make_scheduler(journaled.setup), journaled.setup.block_size).run()
    others = Rehearsal(script, make_scheduler(other), other.block_size).run()
    recorded = [(end["finish_reason"], RequestTimeline(**end["timeline"])) for end in script.ends]
    return {
        "journal": _column(recorded, script.num_steps, script.num_preemptions, 0),
        "own_by_rule": _rehearsed(own),
        "other_by_rule": _rehearsed(others),
    }


def _rehearsed(run: Rehearsal) -> dict[str, Any]:
    ended = [(output.finish_reason.value, output.timeline) for output in run.ends
             if output.finish_reason is not None and output.timeline is not None]
    return _column(ended, run.num_steps, run.num_preemptions, run.num_refused)


def _column(ended: list[tuple[str, RequestTimeline]], num_steps: int, num_preemptions: int,
            num_refused: int) -> dict[str, Any]:
    done = [timeline for reason, timeline in ended if reason not in CUT_SHORT]
    moments = {
        "queue": [one.first_scheduled_at - one.arrived_at for one in done if one.first_scheduled_at is not None],
        "ttft": [one.first_token_at - one.arrived_at for one in done if one.first_token_at is not None],
        "finish": [one.finished_at - one.arrived_at for one in done]}
    facts: dict[str, Any] = {"finished": len(done), "cut_short": len(ended) - len(done), "refused": num_refused}
    for name, seconds in moments.items():
        facts |= {f"{name}_seconds_mean": fmean(seconds) if seconds else None,
                  f"{name}_seconds_p50": percentile(seconds, 50), f"{name}_seconds_p99": percentile(seconds, 99)}
    span = max((one.finished_at for one in done), default=0.0) - min((one.arrived_at for one in done), default=0.0)
    return facts | {"seconds_in_all": span, "steps": num_steps, "preemptions": num_preemptions}
