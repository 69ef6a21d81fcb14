"""Any mix of adding, stepping, forking, aborting, expiring and failing, on any size of engine: books hold and tokens
equal those of solo runs."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import ConfigError, RequestError
from paceline.kv.groups import FULL_ATTENTION, KVGroup
from paceline.request import FinishReason, Request, RequestStatus
from paceline.sched.admission import ADMISSIONS
from paceline.sched.batching import REGIMES
from paceline.sched.chunking import CHUNKINGS
from paceline.sched.gate import GATES
from paceline.sched.ordering import ORDERINGS
from paceline.sched.plan import ScoredToken
from paceline.sched.preemption import PREEMPTIONS, VICTIM_RULES

from ..fakes import EOS, Setup, Stage, make_request, solo_stage

POLICIES = {
    "regime": st.sampled_from(["continuous", *REGIMES]),
    "gate": st.sampled_from(list(GATES)),
    "ordering": st.sampled_from(list(ORDERINGS)),
    "admission": st.sampled_from(list(ADMISSIONS)),
    "preemption": st.sampled_from(list(PREEMPTIONS)),    # never too, whatever the admission: it must not deadlock
    "victim": st.sampled_from(list(VICTIM_RULES)),
    "chunking": st.sampled_from(list(CHUNKINGS)),
}
SETUPS = st.builds(
    Setup,
    num_blocks=st.sampled_from([8, 9, 10, 12, 60]),
    block_size=st.sampled_from([4, 2]),
    max_num_seqs=st.sampled_from([16, 5, 3, 1]),
    max_num_batched_tokens=st.sampled_from([9, 5, 3, 64]),
    watermark=st.sampled_from([0.0, 0.1]),
    max_model_len=st.sampled_from([40, 16]),
    prefix_cache=st.sampled_from(["none", "hash"]),
    **POLICIES,
    batch_timeout_seconds=st.sampled_from([0.0, 3.0]),
    itl_target_ms=st.sampled_from([900.0, 2000.0]),    # a step takes a second
    knobs=st.fixed_dictionaries({
        "priority_aging_seconds": st.sampled_from([None, 2.0]),
        "aging_tokens_per_second": st.sampled_from([0.5, 100.0]),
        "tenant_weights": st.sampled_from(["", "a=3"]), "overcommit_quantile": st.sampled_from([0.5, 0.01]),
        "waiting_served_ratio": st.sampled_from([0.3, 2.0]), "max_waiting_tokens": st.sampled_from([20, 0, 3]),
        "max_batch_prefill_tokens": st.sampled_from([None, 1, 12])}),
    eos_token_ids=st.sampled_from([frozenset(), frozenset({EOS, 5})]),
    transfer_delay=st.sampled_from([0, 1, 3]),
    groups=st.sampled_from([FULL_ATTENTION, (KVGroup(window=5),), (KVGroup(), KVGroup(window=3)),
                            (KVGroup(), KVGroup(window=6), KVGroup(window=6))]),
)

# Two token values: prompts share prefixes often, and hold equal blocks behind different ones.
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=20)
ASKED = st.fixed_dictionaries({
    "tokens": PROMPTS,
    "max_tokens": st.sampled_from([24, 12, 1]),
    "priority": st.integers(0, 2),
    "tenant": st.sampled_from(["a", "b"]),
    "num_choices": st.sampled_from([1, 1, 2, 3, 5]),
    "prompt_logprobs": st.sampled_from([None, None, 0, 3]),
    "is_late": st.booleans(),
    "patience": st.sampled_from([None, None, 3.0, 12.0]),    # from its arrival to its deadline
})


SWITCHES = st.fixed_dictionaries({}, optional=POLICIES | {
    "preemption": st.sampled_from(list(PREEMPTIONS)),
    "max_num_seqs": st.sampled_from([16, 3, 1]),
    "max_num_batched_tokens": st.sampled_from([64, 9, 3]),
    "watermark": st.sampled_from([0.0, 0.1]),
})

UNFORESEEN = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT)


class Engine(RuleBasedStateMachine):
    """Every request's solo run is the oracle for whatever it generated here."""

    @initialize(setup=SETUPS, workload=st.lists(ASKED, min_size=2, max_size=6))
    def start(self, setup: Setup, workload: list[dict]) -> None:
        self.stage = self.make_stage(setup)
        self.expected: dict[str, list[int]] = {}
        self.expected_scores: dict[str, list[ScoredToken]] = {}
        self.plan = None
        self.num_added = 0
        self.deadlines: dict[str, float | None] = {}
        for asked in workload:
            self.add(asked)

    def make_stage(self, setup: Setup) -> Stage:
        return Stage(setup)

    def _expect(self, request: Request) -> None:
        alone = solo_stage(request, self.stage.setup)
        self.expected[request.request_id] = alone.tokens["solo"]
        if request.choice_index == 0:
            self.expected_scores[request.request_id] = alone.scores.get("solo", [])

    @rule(asked=ASKED)
    def add(self, asked: dict) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        prompt = tuple(asked["tokens"][: self.stage.scheduler.max_model_len - 1])
        max_tokens, num_choices = asked["max_tokens"], asked["num_choices"]
        fields = {"priority": asked["priority"], "tenant": asked["tenant"], "seed": self.num_added % 3,
                  "prompt_logprobs": asked["prompt_logprobs"],
                  "arrival_time": float(self.num_added) if asked["is_late"] else 0.0}
        deadline = None if asked["patience"] is None else self.stage.now + asked["patience"]
        try:
            self.stage.add(make_request(name, prompt, max_tokens, num_choices=num_choices, deadline=deadline, **fields))
        except RequestError as refusal:
            assert refusal.code == "deadline_infeasible"
            return
        self.deadlines[name] = deadline
        for i in range(num_choices):
            self._expect(make_request(f"{name}:{i}" if i else name, prompt, max_tokens, choice_index=i, **fields))

    @precondition(lambda self: self.plan is None and self.stage.scheduler.has_work())
    @rule(num_steps=st.integers(1, 6), forget=st.booleans())
    def step(self, num_steps: int, forget: bool) -> None:
        for _ in range(num_steps):
            if self.stage.scheduler.has_work():
                self.stage.step()
                if forget:
                    self.stage.executor.drop_caches()

    @precondition(lambda self: self.plan is None and self.stage.scheduler.has_work())
    @rule()
    def schedule(self) -> None:
        self.plan = self.stage.schedule()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def update(self) -> None:
        self.stage.update(self.plan)
        self.plan = None

    @precondition(lambda self: self.expected)
    @rule(index=st.integers(0, 1000), twice=st.booleans())
    def abort(self, index: int, twice: bool) -> None:
        names = list(self.expected)
        name = names[index % len(names)]
        self.stage.abort(*([name] * (1 + twice)))

    @precondition(lambda self: self.plan is None)
    @rule()
    def expire(self) -> None:
        self.stage.expire()

    @precondition(lambda self: self.stage.scheduler.has_work())
    @rule(picked=st.lists(st.integers(0, 1000), min_size=1, max_size=3))
    def fail(self, picked: list[int]) -> None:
        """The next row of some of those who run, whatever it is, gives nothing; with them their unborn choices end."""
        names = [request.request_id for request in self.stage.scheduler.running]
        self.stage.executor.failing |= {names[index % len(names)] for index in picked if names}

    @precondition(lambda self: self.plan is None)
    @rule(index=st.integers(0, 1000), seed=st.integers(0, 3))
    def fork(self, index: int, seed: int) -> None:
        running = [r for r in self.stage.scheduler.running if r.num_output_tokens and r.status is RequestStatus.RUNNING]
        if not running:
            return
        parent = running[index % len(running)]
        name = f"f{self.num_added}"
        self.num_added += 1
        # As a prompt, what the parent knows so far leads to the same continuation: draws depend on positions only.
        child = make_request(name, parent.token_ids(0, parent.num_tokens), 6, seed=seed, parent_id=parent.request_id,
                             arrival_time=parent.arrival_time, priority=parent.priority)
        if child.num_tokens < self.stage.scheduler.max_model_len:
            self._expect(child)
            self.deadlines[name] = self.deadlines[parent.request_id.partition(":")[0]]    # it ends with its family
            self.stage.fork(parent.request_id, child)

    @precondition(lambda self: self.plan is None)
    @rule(knobs=SWITCHES)
    def switch(self, knobs: dict) -> None:
        config = self.stage.scheduler.config
        if knobs.get("preemption", config.preemption) == "never":
            knobs = knobs | {"admission": "reserve"}
        try:
            self.stage.switch(**knobs)
        except ConfigError as refusal:    # the windows' pool was sized for less
            assert self.stage.scheduler.config is config
            assert re.match("max_num_batched_tokens|chunking", str(refusal))

    @invariant()
    def tokens_so_far_are_those_of_the_solo_run(self) -> None:
        if not hasattr(self, "stage"):
            return
        for name, tokens in self.stage.tokens.items():
            assert tokens == self.expected[name][: len(tokens)], name
        for name, scores in self.stage.scores.items():
            assert scores == self.expected_scores[name][: len(scores)], name

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        if self.plan is not None:
            self.stage.update(self.plan)
        stage = self.stage.run(max_steps=5000)
        assert stage.finished.keys() == self.expected.keys()
        for name, output in stage.finished.items():
            failing = stage.executor.failing
            assert name not in failing or output.finish_reason in UNFORESEEN
            if output.finish_reason is FinishReason.ERROR:    # it, or the parent it was to be born of
                assert {name, name.partition(":")[0]} & failing
            elif output.finish_reason is FinishReason.TIMEOUT:
                deadline = self.deadlines[name.partition(":")[0]]
                was_given_up = output.timeline.first_scheduled_at is None    # it could not be kept any more
                assert deadline is not None and (was_given_up or deadline <= stage.now)
            elif output.finish_reason is not FinishReason.ABORT:
                assert stage.tokens[name] == self.expected[name]
                assert stage.scores.get(name, []) == self.expected_scores.get(name, [])
        stats = stage.scheduler.stats()
        in_transit = stage.scheduler.kv.pool.num_in_transit_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks + in_transit == stats.num_blocks


Engine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck))
TestEngine = Engine.TestCase
