"""The engine as a library: what a caller may hand in, what is refused, and what an interrupted call leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.clock import WallClock
from paceline.engine.async_engine import ServedModel
from paceline.engine.core import EngineCore
from paceline.engine.events import EngineEvents
from paceline.engine.llm import LLM
from paceline.errors import RequestError
from paceline.model.chat_template import ChatTemplate
from paceline.model.dummy import dummy_tokenizer
from paceline.sched.plan import SchedulerOutput, StepResult
from tests.fakes import VOCAB_SIZE, Setup, ShadowExecutor, Stage


class Interrupted(ShadowExecutor):
    """In the given step, someone presses Ctrl-C while the model runs."""

    def __init__(self, setup: Setup, step_id: int | None) -> None:
        super().__init__(setup.num_blocks, setup.block_size)
        self.step_id = step_id

    def collect(self, ticket: SchedulerOutput) -> StepResult:
        if ticket.step_id == self.step_id:
            os.kill(os.getpid(), signal.SIGINT)
        return super().collect(ticket)


def make_llm(setup: Setup | None = None, interrupted_in: int | None = None, **facts: Any) -> LLM:
    setup = setup or Setup()
    executor = Interrupted(setup, interrupted_in)
    core = EngineCore(Stage(setup).scheduler, executor, WallClock(), EngineEvents(lambda listener, error: None))
    model = ServedModel(**{
        "tokenizer": dummy_tokenizer(300), "chat_template": None, "max_model_len": setup.max_model_len,
        "eos_token_ids": frozenset(), "fingerprint": "shadow", "vocab_size": VOCAB_SIZE, **facts})
    return LLM(core, model, WallClock(), lambda: 7, lambda: None)


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield make_llm()


def generate(llm: LLM, prompts: Any = ([1, 2, 3],), **more: Any) -> Any:
    return llm.generate(list(prompts), show_progress=False, **{"ignore_eos": True, **more})


def test_an_interrupted_call_leaves_the_engine_whole(ctrl_c_interrupts: None) -> None:
    llm = make_llm(interrupted_in=5)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[1, 2, 3], [4, 5]], n=2, max_tokens=50)
    llm.core.scheduler.check()
    stats = llm.core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert generate(llm)[0].token_ids == generate(make_llm())[0].token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_token_that_stops_is_counted_and_not_shown(llm: LLM) -> None:
    free = generate(llm, max_tokens=8)[0]
    stopper = free.token_ids[4]
    stopped = generate(llm, max_tokens=8, stop_token_ids=[stopper])[0]
    where = free.token_ids.index(stopper) + 1
    assert stopped.token_ids == free.token_ids[:where] and stopped.finish_reason == "stop"
    assert stopped.text == llm.model.tokenizer.decode(free.token_ids[: where - 1])


def test_a_chat_is_the_rendered_prompt_and_may_go_on_with_its_last_message() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}.{% endfor %}{{ '>' if add_generation_prompt }}{{ x }}")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    for more, prompt in (({}, b"hi.so.>"), ({"chat_template_kwargs": {"x": "!"}}, b"hi.so.>!"),
                         ({"continue_final_message": True}, b"hi.so")):
        llm = make_llm(chat_template=template, vocab_size=300)
        told = llm.chat([chat], show_progress=False, ignore_eos=True, **more)
        assert told == generate(make_llm(vocab_size=300), [list(prompt)])
    with pytest.raises(RequestError, match="no chat template"):
        make_llm().chat([chat])


def test_numbers_may_come_from_numpy(llm: LLM) -> None:
    plain = generate(llm, max_tokens=4, seed=3, temperature=0.5)
    fancy = generate(llm, [np.array([1, 2, 3])], max_tokens=np.int32(4), seed=np.int64(3), temperature=np.float32(0.5))
    assert plain == fancy


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, Any]] = [
    *[(name, value) for name in ("min_p", "typical_p") for value in (NAN, INF, -INF, -0.1, 1.1, "x", [])],
    ("typical_p", 0), ("top_p", 0),
    *[("repetition_penalty", value) for value in (NAN, INF, 0, -1, 0.009, 101, "x")],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (NAN, INF, -2.1, 2.1, "x")],
    *[("logit_bias", value) for value in ({1: NAN}, {1: INF}, {1: -100.1}, {1: 101}, {-1: 0}, {VOCAB_SIZE: 0}, {"x": 0},
                                          {1: "x"}, 5, [(1, 1), (1, 2)], {1.5: 0}, dict.fromkeys(range(1025), 0.0))],
    *[("min_tokens", value) for value in (-1, 17, 1.5, "x")],
    *[("allowed_token_ids", value) for value in ([], [-1], [VOCAB_SIZE], ["a"], 5, [1.5])],
    *[("bad_words", value) for value in ([""], [" "], [[]], [[VOCAB_SIZE]], [5], 5, [["a"]], [[1, 2] * 2049])],
    *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, 1.5, "x", 10**9)],
    *[(name, value) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
      for value in (1, "x")],
    *[("best_of", value) for value in (0, 129, 1.5, "x")],
    *[("truncate_prompt_tokens", value) for value in (0, -2, 10**9, 1.5, "x")],
]


@pytest.mark.parametrize(("name", "value"), [
    ("max_tokens", "5"), ("max_tokens", 2.5), ("top_k", 1.5), ("seed", 1.0), ("temperature", "hot"), ("top_p", []),
    ("stop", [5]), ("stop", 5), ("stop_token_ids", ["a"]), ("stop_token_ids", 5), ("stop_token_ids", [VOCAB_SIZE]),
    ("max_tokens", 0), ("temperature", float("nan")), ("stop", [""]), ("seed", 1 << 63), *OUT_OF_RANGE,
])
def test_a_value_of_the_wrong_kind_is_refused_by_name_before_anything_runs(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        generate(llm, **{name: value})
    assert refused.value.param == name
    assert not llm.core.has_work()


def test_bad_words_that_leave_none_of_the_allowed_tokens_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        generate(llm, allowed_token_ids=[5, 6], bad_words=[[5], [6]])


@pytest.mark.parametrize(("name", "value"), [
    ("min_p", 0), ("min_p", 1), ("typical_p", 1), ("typical_p", 1e-9), ("repetition_penalty", 0.01),
    ("repetition_penalty", 100), ("presence_penalty", -2), ("frequency_penalty", 2), ("min_tokens", 0),
    ("min_tokens", 16),
    ("logit_bias", {}), ("logit_bias", {0: -100, VOCAB_SIZE - 1: 100}), ("allowed_token_ids", [0]), ("bad_words", []),
    ("bad_words", [[5, 5]]), ("logprobs", True), ("logprobs", False), ("logprobs", 20), ("prompt_logprobs", 0),
    ("best_of", 1), ("truncate_prompt_tokens", 1), ("truncate_prompt_tokens", -1), ("stop", "one"),
])
def test_the_edges_are_legal(llm: LLM, name: str, value: Any) -> None:
    assert generate(llm, **{name: value})[0].finish_reason == "length"


def test_a_prompt_may_be_cut_to_its_end(llm: LLM) -> None:
    whole = generate(llm, [[7, 8, 9]])[0]
    assert generate(llm, [[1, 2, 7, 8, 9]], truncate_prompt_tokens=3)[0].token_ids == whole.token_ids
    longest = generate(llm, [list(range(1, 60)) * 5], truncate_prompt_tokens=-1, max_tokens=20)[0]
    assert (longest.num_prompt_tokens, len(longest.token_ids)) == (180, 20)


def test_all_choices_of_a_prompt_have_its_scores(llm: LLM) -> None:
    choices = generate(llm, [[5, 6, 7], [8, 9]], n=2, prompt_logprobs=0)
    assert [[one.token_id for one in choice.prompt_logprobs] for choice in choices] == [[6, 7]] * 2 + [[9]] * 2
    assert generate(llm)[0].prompt_logprobs is None


@pytest.mark.parametrize("prompt", [[], [1.5], ["a"], [VOCAB_SIZE], [-1], 5, None])
def test_so_is_a_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        generate(llm, [[1], prompt])
    assert not llm.core.has_work()


def test_tenants_take_turns_under_fair() -> None:
    llm = make_llm(Setup(max_num_seqs=1, ordering="fair"))
    generate(llm, [[1], [2], [3], [4]], tenants=["a", "a", "a", "b"], max_tokens=1)
    assert [row.token_ids for plan in llm.core.executor.steps for row in plan.rows] == [(1,), (4,), (2,), (3,)]
    with pytest.raises(RequestError, match="tenants: 1 for 2"):
        generate(llm, [[1], [2]], tenants=["a"])


def test_priorities_decide_who_is_first_and_are_refused_where_nobody_looks() -> None:
    one_at_a_time = Setup(max_num_seqs=1, ordering="priority")
    llm = make_llm(one_at_a_time, reads_priority=True)
    generate(llm, [[1], [2], [3]], priorities=[3, 1, 2], max_tokens=1)
    executor = llm.core.executor
    assert isinstance(executor, ShadowExecutor)
    assert [row.token_ids for plan in executor.steps for row in plan.rows] == [(2,), (3,), (1,)]
    with pytest.raises(RequestError, match="2 for 1"):
        generate(llm, [[1]], priorities=[1, 2])
    with pytest.raises(RequestError, match="ordering"):
        generate(make_llm(reads_priority=False), [[1]], priorities=[1])
