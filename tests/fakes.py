"""Fakes that can be wrong: an executor whose tokens depend on what block tables really read, and a stage to play on.

ShadowExecutor keeps (token, position, context) in shadow slots, where context digests everything below as it was *read*
when the slot was written, like K/V of a deep layer. Stale, aliased, mis-shared or un-recomputed blocks change tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.config import SchedulerConfig
from paceline.engine.events import EngineEvents, StepRecord
from paceline.engine.messages import Submit
from paceline.kv.groups import FULL_ATTENTION, NULL_BLOCK, KVBudget, KVGroup
from paceline.kv.manager import KVCacheManager
from paceline.kv.prefix_hash import PREFIX_CACHES
from paceline.request import FinishReason, Request, SamplingParams
from paceline.sched.admission import ADMISSIONS
from paceline.sched.batching import REGIMES
from paceline.sched.chunking import CHUNKINGS
from paceline.sched.gate import GATES
from paceline.sched.ordering import ORDERINGS
from paceline.sched.outputs import RequestOutput
from paceline.sched.plan import (
    KVLayout,
    RowResult,
    SamplingRef,
    ScheduledRequest,
    SchedulerOutput,
    ScoredToken,
    StepResult,
    TransferKind,
)
from paceline.sched.policies import Policies
from paceline.sched.preemption import PREEMPTIONS, VICTIM_RULES
from paceline.sched.scheduler import Scheduler

VOCAB_SIZE = 64
EOS = 0
POISON = (-1, -1, -1)
SAMPLING_FIELDS = ("seed", "stop_token_ids", "ignore_eos", "min_tokens", "stop", "prompt_logprobs")

Slot = tuple[int, int, int]


def draw(slots: list[Slot], sampling: SamplingRef, position: int) -> int:
    """The next token: a hash of all that was read and of the sampling key. Ints only, so runs repeat."""
    key = (sampling.params.seed, sampling.prompt_index, sampling.choice_index, position)
    return hash((tuple(slots), key)) % VOCAB_SIZE


class ShadowExecutor:
    """Runs plans on shadow slots. `transfer_delay` is how many steps later a copy is reported done."""

    def __init__(self, num_blocks: int, block_size: int, transfer_delay: int = 0,
                 groups: tuple[KVGroup, ...] = FULL_ATTENTION) -> None:
        self.block_size = block_size
        self.groups = groups
        self.slots: list[list[Slot]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.transfer_delay = transfer_delay
        self.seconds_of: Callable[[SchedulerOutput], float] = lambda plan: 0.01
        self.steps: list[SchedulerOutput] = []
        self._unreported: list[tuple[int, int]] = []    # (step to report in, transfer id)
        self._tables: dict[str, tuple[tuple[tuple[int, ...], ...], list[list[int]]]] = {}    # rebuilt from plans
        self.failing: set[str] = set()    # rows of these requests give no token and leave garbage

    def kv_layout(self) -> KVLayout:
        return KVLayout(num_blocks=len(self.slots), block_size=self.block_size, bytes_per_block=1)

    def drop_caches(self) -> None:
        self._tables.clear()

    def submit(self, plan: SchedulerOutput) -> SchedulerOutput:
        return plan

    def collect(self, ticket: SchedulerOutput) -> StepResult:
        plan = ticket
        self.steps.append(plan)
        for transfer in plan.transfers:
            assert transfer.kind is TransferKind.COPY
            self.slots[transfer.destination] = list(self.slots[transfer.source])
            self._unreported.append((plan.step_id + self.transfer_delay, transfer.transfer_id))
        for row in plan.all_rows:
            self._poison_beyond(row)
        for row in plan.all_rows:
            if row.request_id not in self.failing:    # else what it was to write stays poison
                self._write(row)
        rows = tuple(RowResult(row.request_id, failure="made to") if row.request_id in self.failing
                     else self._sample(row) for row in plan.rows)    # after all writes: aliased blocks show
        done = tuple(transfer_id for step_id, transfer_id in self._unreported if step_id <= plan.step_id)
        self._unreported = [entry for entry in self._unreported if entry[0] > plan.step_id]
        return StepResult(plan.step_id, rows, duration_seconds=self.seconds_of(plan), transfers_done=done)

    def _row_tables(self, row: ScheduledRequest) -> list[list[int]]:
        cached = self._tables.get(row.request_id)
        if cached is None or cached[0] is not row.block_ids:
            cached = self._tables[row.request_id] = (row.block_ids, [list(table) for table in row.block_ids])
        assert len(cached[1]) == len(self.groups)
        return cached[1]

    def _poison_beyond(self, row: ScheduledRequest) -> None:
        """What a row has not computed is nobody's: if somebody shares it, it should hurt."""
        for table in self._row_tables(row):
            for position in range(row.num_computed_tokens, len(table) * self.block_size):
                self.slots[table[position // self.block_size]][position % self.block_size] = POISON

    def _read(self, table: list[int], position: int) -> Slot:
        block_id = table[position // self.block_size]
        assert block_id != NULL_BLOCK, "a null block was read"
        return self.slots[block_id][position % self.block_size]

    def _visible(self, group: KVGroup, position: int) -> range:
        return range(0 if group.window is None else max(position - group.window + 1, 0), position + 1)

    def _write(self, row: ScheduledRequest) -> None:
        for index, (group, table) in enumerate(zip(self.groups, self._row_tables(row), strict=True)):
            for position, token_id in enumerate(row.token_ids, start=row.num_computed_tokens):
                assert isinstance(token_id, int)
                seen = self._visible(group, position)[:-1]
                below = [self._read(table, at) for at in (*seen[:1], *seen[-1:])]
                slot = (token_id, position, hash((index, *below, token_id, position)))
                self.slots[table[position // self.block_size]][position % self.block_size] = slot

    def _sample(self, row: ScheduledRequest) -> RowResult:
        tokens = []
        for offset in row.logits_offsets:
            assert row.sampling is not None
            position = row.num_computed_tokens + offset
            tokens.append(draw(self._all_read(row, position), row.sampling, position + 1))
        return RowResult(row.request_id, tuple(tokens), scored=self._score(row))

    def _all_read(self, row: ScheduledRequest, position: int) -> list[Slot]:
        return [self._read(table, at) for group, table in zip(self.groups, self._row_tables(row), strict=True)
                for at in self._visible(group, position)]

    def _score(self, row: ScheduledRequest) -> tuple[ScoredToken, ...]:
        """A made-up log-probability of all that was read before the token, and of the token."""
        if row.scored is None:
            return ()
        first = row.num_computed_tokens + row.scored.first_offset
        return tuple(ScoredToken(token_id, -float(hash((tuple(self._all_read(row, position)), token_id)) % 1000))
                     for position, token_id in enumerate(row.scored.token_ids, first))


POLICY_TABLES = {"regime": REGIMES, "gate": GATES, "ordering": ORDERINGS, "admission": ADMISSIONS,
                 "preemption": PREEMPTIONS, "victim": VICTIM_RULES, "chunking": CHUNKINGS}


def make_policies(**names: str) -> Policies:
    """By name; the others are those of SchedulerConfig's defaults."""
    assert names.keys() <= POLICY_TABLES.keys()
    default = SchedulerConfig()
    return Policies(**{kind: table[names.get(kind, getattr(default, kind))] for kind, table in POLICY_TABLES.items()})


def policies_of(config: SchedulerConfig) -> Policies:
    """Also combinations that build.py refuses: the schedule must be exact under them too."""
    return make_policies(**{kind: getattr(config, kind) for kind in POLICY_TABLES})


def make_request(request_id: str, prompt: int | tuple[int, ...] = 5, max_tokens: int = 4, **fields: object) -> Request:
    """`prompt` is token ids, or how many to make up: equal lengths give equal prefixes only with equal `salt`.

    Fields of SamplingParams (those in SAMPLING_FIELDS) and of Request are told apart by name.
    """
    salt = int(fields.pop("salt", 0))    # type: ignore[call-overload]
    tokens = prompt if isinstance(prompt, tuple) else tuple((7 * i + 13 * salt) % 50 + 1 for i in range(prompt))
    named = {name: fields.pop(name) for name in SAMPLING_FIELDS if name in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **named)    # type: ignore[arg-type]
    fields.setdefault("arrival_time", 0.0)
    return Request(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, **fields)    # type: ignore[arg-type]


@dataclass(kw_only=True)
class Setup:
    """A size of engine. The defaults are roomy."""

    num_blocks: int = 400
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    watermark: float = 0.0
    max_model_len: int = 200
    prefix_cache: str = "hash"
    regime: str = "continuous"
    gate: str = "none"
    ordering: str = "fcfs"
    admission: str = "watermark"
    preemption: str = "recompute"
    victim: str = "latest_arrival"
    chunking: str = "fixed"
    batch_timeout_seconds: float = 3.0
    itl_target_ms: float = 50.0
    knobs: Mapping[str, Any] = field(default_factory=dict)    # further ones of SchedulerConfig
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    transfer_delay: int = 0
    groups: tuple[KVGroup, ...] = FULL_ATTENTION

    @property
    def max_step_tokens(self) -> int:
        return max(self.max_num_batched_tokens, self.max_model_len if self.chunking == "whole" else 0)

    @property
    def scheduler_knobs(self) -> dict[str, Any]:
        own = {declared.name for declared in fields(self)}
        return {declared.name: getattr(self, declared.name) for declared in fields(SchedulerConfig)
                if declared.name in own} | dict(self.knobs)


ALONE = {"regime": "continuous", "gate": "none", "admission": "watermark", "preemption": "recompute",
         "chunking": "fixed"}


def _never(listener: object, error: Exception) -> None:
    raise error


def submit_of(request: Request) -> Submit:
    """The message that would bring this request."""
    return Submit(**{one.name: getattr(request, one.name) for one in fields(Submit)})


class Stage:
    """Scheduler and ShadowExecutor, stepped together; the books are checked after every step."""

    def __init__(self, setup: Setup, events: EngineEvents | None = None) -> None:
        self.setup = setup
        self.events = events or EngineEvents(_never)
        kv = KVCacheManager(setup.num_blocks, setup.block_size, PREFIX_CACHES[setup.prefix_cache], setup.groups,
                            setup.max_step_tokens)
        config = SchedulerConfig(**setup.scheduler_knobs)
        self.scheduler = Scheduler(
            config,
            kv,
            policies_of(config),
            max_model_len=setup.max_model_len,
            eos_token_ids=setup.eos_token_ids,
        )
        self.executor = ShadowExecutor(setup.num_blocks, setup.block_size, setup.transfer_delay, setup.groups)
        self.now = 0.0
        self.is_timed = False    # whether the clock shows what steps took, and nothing else; else a second for each
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[ScoredToken]] = {}
        self.outputs: list[RequestOutput] = []
        self.finished: dict[str, RequestOutput] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.events.record(lambda recorder: recorder.on_added(submit_of(request), self.now))    # noqa: B023

    def fork(self, parent_id: str, child: Request) -> None:
        self.scheduler.fork(parent_id, child)
        self.events.record(lambda recorder: recorder.on_forked(parent_id, submit_of(child), self.now))
        self.scheduler.check()

    def switch(self, **knobs: object) -> None:
        """Other policies and numbers, by the names of SchedulerConfig; what is not named stays."""
        config = replace(self.scheduler.config, **knobs)    # type: ignore[arg-type]
        self.scheduler.switch_policies(policies_of(config), config)
        self.events.record(lambda recorder: recorder.on_switched(config, self.now))
        self.scheduler.check()

    def step(self) -> SchedulerOutput:
        plan = self.schedule()
        self.update(plan)
        return plan

    def schedule(self) -> SchedulerOutput:
        self.now += 0.0 if self.is_timed else 0.5
        self.expire()
        num_running = len(self.scheduler.running)    # more than may run, where a switch has lowered the limit
        plan = self.scheduler.schedule(self.now)
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens or len(plan.rows) == 1
        assert plan.num_running <= max(config.max_num_seqs, num_running)
        self.events.record(lambda recorder: recorder.on_planned(plan, self.now))
        self.scheduler.check()
        self.plans.append(plan)
        return plan

    def update(self, plan: SchedulerOutput) -> None:
        planned_at = self.now
        result = self.executor.collect(self.executor.submit(plan))
        self.now += result.duration_seconds if self.is_timed else 0.5
        outputs = self.scheduler.update(plan, result, self.now)
        step = StepRecord(plan, result, tuple(outputs), self.scheduler.stats(), planned_at, self.now)
        self.events.record(lambda recorder: recorder.on_landed(step))
        self.note(outputs)
        self.scheduler.check()

    def abort(self, *request_ids: str) -> None:
        outputs = self.scheduler.abort(request_ids, self.now)
        self.events.record(lambda recorder: recorder.on_aborted(request_ids, self.now, tuple(outputs)))
        self.note(outputs)
        self.scheduler.check()

    def expire(self) -> None:
        if outputs := self.scheduler.expire(self.now):
            self.events.record(lambda recorder: recorder.on_expired(self.now, tuple(outputs)))
            self.note(outputs)
        self.scheduler.check()

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "news of a request that had ended"
            self.outputs.append(output)
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs:
                assert not self.tokens[output.request_id] or output.token_ids, "scores after a token"
                self.scores.setdefault(output.request_id, []).extend(output.prompt_logprobs)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    def run(self, max_steps: int = 2000) -> Stage:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return self
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    @property
    def reasons(self) -> dict[str, FinishReason | None]:
        return {request_id: output.finish_reason for request_id, output in self.finished.items()}

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.stats().num_preemptions


def solo(request: Request, setup: Setup) -> list[int]:
    """What the request generates alone in a roomy engine that reuses nothing."""
    return solo_stage(request, setup).tokens["solo"]


def solo_stage(request: Request, setup: Setup) -> Stage:
    alone = Request(
        request_id="solo",
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        arrival_time=0.0,
        prompt_index=request.prompt_index,
        choice_index=request.choice_index,
    )
    budget = KVBudget(setup.num_blocks, setup.block_size, setup.groups, setup.max_step_tokens)
    limit = budget.num_tokens_that_fit(setup.max_model_len)
    num_tokens = request.num_tokens + request.sampling.max_tokens
    num_blocks = (num_tokens // setup.block_size + 1) * len(setup.groups)    # few: they are checked
    roomy = replace(setup, num_blocks=num_blocks, max_num_batched_tokens=512, prefix_cache="none", max_model_len=limit,
                    max_num_seqs=1, transfer_delay=0, knobs={}, **ALONE)
    stage = Stage(roomy)
    stage.add(alone)
    return stage.run()
