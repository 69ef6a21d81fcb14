"""The two transports and the asyncio engine behind them, over the real core on shadow slots."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest

from paceline.clock import VirtualClock, WallClock
from paceline.engine.async_engine import MAX_UNREAD_NEWS, AsyncEngine, ServedModel
from paceline.engine.core import EngineCore
from paceline.engine.events import EngineEvents
from paceline.engine.messages import Message, News, Outputs, Ready, RequestOutput, Stop, Submit
from paceline.engine.queue_limits import QueueLimits
from paceline.engine.transport import TRANSPORTS, ProcessTransport, _PipeInbox, run_loop
from paceline.errors import ConfigError, EngineDead, Overloaded, PromptTooLong
from paceline.request import FinishReason, SamplingParams
from paceline.sched.plan import SchedulerOutput, StepResult
from tests.fakes import Setup, ShadowExecutor, Stage

SETUP = Setup(num_blocks=64, max_model_len=200)
LIMITS = QueueLimits(max_choices=64)


class FailsAt(ShadowExecutor):
    """Breaks in the given step: as an error, by ending the process as a crash would, or by never coming back."""

    def __init__(self, step_id: int, how: str) -> None:
        super().__init__(SETUP.num_blocks, SETUP.block_size)
        self._step_id, self._how = step_id, how

    def collect(self, ticket: SchedulerOutput) -> StepResult:
        if ticket.step_id == self._step_id:
            if self._how == "crash":
                os._exit(9)
            if self._how == "hang":
                a_step_that_hangs()
            raise RuntimeError("a kernel broke")
        return super().collect(ticket)


def a_step_that_hangs() -> None:
    threading.Event().wait()


@dataclass
class Loaded:
    core: EngineCore
    ready: Ready

    def close(self) -> None:
        pass


def load(fails_at: int | None = None, how: str = "error") -> Loaded:
    executor = (ShadowExecutor(SETUP.num_blocks, SETUP.block_size) if fails_at is None
                else FailsAt(fails_at, how))
    core = EngineCore(Stage(SETUP).scheduler, executor, WallClock(), EngineEvents(lambda listener, error: None))
    return Loaded(core, Ready(max_model_len=200, num_blocks=64, block_size=4, fingerprint="shadow"))


def load_badly() -> Loaded:
    raise ConfigError("num_kv_blocks: more than there is")


def served(ready: Ready) -> ServedModel:
    return ServedModel(tokenizer=None, chat_template=None, max_model_len=ready.max_model_len,
                       eos_token_ids=frozenset(), fingerprint=ready.fingerprint, vocab_size=64)


def submit(request_id: str, max_tokens: int = 4, num_choices: int = 1) -> Submit:
    return Submit(request_id=request_id, prompt_token_ids=(1, 2, 3, 4, 5), arrival_time=0.0, num_choices=num_choices,
                  sampling=SamplingParams(max_tokens=max_tokens))


def with_engine(transport: str, story: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
                make_core: Callable[[], Loaded] = load, limits: QueueLimits = LIMITS,
                step_timeout_seconds: float | None = None) -> None:
    async def play() -> None:
        engine = AsyncEngine(TRANSPORTS[transport](make_core), served, limits, WallClock(),
                             step_timeout_seconds)
        assert engine.state == "loading"
        await engine.start()
        try:
            await asyncio.wait_for(story(engine), 60)
        finally:
            await engine.stop()

    asyncio.run(play())


both = pytest.mark.parametrize("transport", sorted(TRANSPORTS))


@both
def test_a_request_streams_its_tokens_and_ends_once(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        assert (engine.state, engine.model.fingerprint) == ("ready", "shadow")
        outputs = [output async for output in engine.submit(submit("a"))]
        assert sum(len(output.token_ids) for output in outputs) == 4
        assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]
        assert engine.num_unfinished == 0
        assert engine.stats is not None and engine.stats.num_free_blocks == 64

    with_engine(transport, story)


def test_both_transports_bring_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "random"))
    brought: dict[str, list[tuple[int, ...]]] = {}
    for transport in TRANSPORTS:
        async def story(engine: AsyncEngine, transport: str = transport) -> None:
            await engine.ready()
            streams = [engine.submit(submit(f"r{index}", max_tokens=3 + index)) for index in range(5)]
            brought[transport] = [tuple([t async for output in stream for t in output.token_ids]) for stream in streams]

        with_engine(transport, story)
    assert brought["thread"] == brought["process"]


@both
def test_choices_come_interleaved_on_one_stream(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", num_choices=3))
        assert engine.num_unfinished == 3
        ends: list[RequestOutput] = [output async for output in stream if output.finish_reason is not None]
        assert sorted(output.choice_index for output in ends) == [0, 1, 2]
        assert engine.num_unfinished == 0

    with_engine(transport, story)


@both
def test_an_aborted_request_frees_its_blocks_and_others_go_on(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        leaving, staying = engine.submit(submit("a", max_tokens=150)), engine.submit(submit("b", max_tokens=20))
        await anext(leaving)
        leaving.abort()
        leaving.abort()    # twice is no error
        assert [output async for output in leaving][-1:] in ([], [None]) or not leaving.is_open
        assert sum([len(output.token_ids) async for output in staying]) == 20
        after = engine.submit(submit("c"))
        assert len([output async for output in after]) == 4
        assert engine.stats is not None and engine.stats.num_free_blocks == 64 and engine.stats.num_running == 0

    with_engine(transport, story)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        held = engine.submit(submit("a", num_choices=2))
        with pytest.raises(Overloaded, match=r"2 requests are unfinished, 1 more would exceed max_queue") as refused:
            engine.submit(submit("b"))
        assert 1 <= refused.value.retry_after_seconds <= 60
        assert len({output.request_id async for output in held}) == 2
        assert len([output async for output in engine.submit(submit("b"))]) == 4

    with_engine("thread", story, limits=QueueLimits(max_choices=2))


@both
def test_a_request_the_core_refuses_fails_alone(transport: str) -> None:
    """The door checks the same limits; if it ever let one through, nobody else may pay for it."""
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        staying = engine.submit(submit("a", max_tokens=20))
        with pytest.raises(PromptTooLong, match="400 tokens"):
            async for _ in engine.submit(replace(submit("b"), prompt_token_ids=(1,) * 400)):
                pass
        assert sum([len(output.token_ids) async for output in staying]) == 20
        assert engine.num_unfinished == 0

    with_engine(transport, story)


@both
def test_a_step_that_fails_tells_every_stream(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        streams = [engine.submit(submit(f"r{index}", max_tokens=100)) for index in range(3)]
        for stream in streams:
            with pytest.raises(EngineDead, match="a kernel broke"):
                async for _ in stream:
                    pass
        assert engine.state == "dead"
        with pytest.raises(EngineDead, match="dead"):
            engine.submit(submit("late"))

    with_engine(transport, story, partial(load, 5))


def test_an_engine_process_that_vanishes_is_noticed() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineDead, match="exit status 9"):
            async for _ in engine.submit(submit("a", max_tokens=100)):
                pass
        assert engine.state == "dead"

    with_engine("process", story, partial(load, 3, "crash"))


@both
def test_a_step_that_hangs_is_given_up_with_its_stack(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineDead, match=r"running for more than 0\.2 seconds"):
            async for _ in engine.submit(submit("a", max_tokens=100)):
                pass
        await engine.until_dead()
        assert (engine.state, engine.num_unfinished) == ("dead", 0)
        if isinstance(engine._transport, ProcessTransport):
            await asyncio.to_thread(engine._transport.join, 20)    # it has written its stacks by then
            assert engine._transport._process.exitcode == -signal.SIGABRT

    with_engine(transport, story, partial(load, 3, "hang"), step_timeout_seconds=0.2)
    assert "in a_step_that_hangs" in capfd.readouterr().err


def test_an_engine_does_not_run_away_from_a_front_that_is_busy() -> None:
    loaded = load()

    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", max_tokens=190))
        while engine._unread._value:    # keeps the event loop busy until the engine waits for it
            pass
        executor = loaded.core.executor
        assert isinstance(executor, ShadowExecutor)
        assert len(executor.steps) <= MAX_UNREAD_NEWS + 1
        assert sum([len(output.token_ids) async for output in stream]) == 190

    with_engine("thread", story, lambda: loaded)


def test_an_engine_with_nothing_to_do_does_not_hang() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        assert not engine.is_stalled(0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.until_dead(), 0.2)    # twenty looks
        assert len([output async for output in engine.submit(submit("a"))]) == 4

    with_engine("thread", story, step_timeout_seconds=0.04)


def test_a_killed_engine_process_is_a_dead_engine() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", max_tokens=190))
        await anext(stream)
        transport = engine._transport
        assert isinstance(transport, ProcessTransport)
        transport.kill()
        with pytest.raises(EngineDead, match=f"exit status -{signal.SIGKILL.value}"):
            async for _ in stream:
                pass
        await engine.until_dead()
        assert engine.num_unfinished == 0

    with_engine("process", story)


@both
def test_limits_count_tenants_and_tokens_until_the_last_choice_has_ended(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        held = engine.submit(replace(submit("a", num_choices=2), tenant="x"))
        for refused in (replace(submit("b"), tenant="x"), replace(submit("b"), tenant="y", prompt_token_ids=(1,) * 96)):
            with pytest.raises(Overloaded):
                engine.submit(refused)
        engine.check_room()
        others = engine.submit(replace(submit("b"), tenant="y"))
        assert len({output.request_id async for output in held}) == 2
        assert len([output async for output in others]) == 4
        assert (engine._gate.num_choices, engine._gate.num_tokens) == (0, 0)
        again = engine.submit(replace(submit("a"), tenant="x"))
        again.abort()
        assert (engine._gate.num_choices, engine._gate.num_tokens) == (0, 0)

    limits = QueueLimits(max_choices=64, max_tokens=100, max_choices_per_tenant=2)
    with_engine(transport, story, limits=limits)


@both
def test_a_mistake_in_the_configuration_is_told_as_such(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        with pytest.raises(ConfigError, match="num_kv_blocks: more than there is"):
            await engine.ready()

    with_engine(transport, story, load_badly)    # type: ignore[arg-type]


@both
def test_draining_takes_nothing_new_and_finishes_the_rest(transport: str) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", max_tokens=50))
        draining = asyncio.ensure_future(engine.drain(60))
        await asyncio.sleep(0)    # lets the drain begin
        with pytest.raises(EngineDead, match="draining"):
            engine.submit(submit("b"))
        assert sum([len(output.token_ids) async for output in stream]) == 50
        await draining

    with_engine(transport, story)


def test_stopping_tells_open_streams() -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", max_tokens=190))
        await engine.drain(0.0)
        await engine.stop()
        with pytest.raises(EngineDead, match="shutting down"):
            async for _ in stream:
                pass

    with_engine("thread", story)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_does_not_cut_the_engine_from_its_front(number: int) -> None:
    """A terminal's Ctrl-C and a service manager's SIGTERM reach the child too; the front wants to drain."""
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        stream = engine.submit(submit("a", max_tokens=150))
        await anext(stream)
        transport = engine._transport
        assert isinstance(transport, ProcessTransport) and transport._process.pid is not None
        os.kill(transport._process.pid, number)
        await engine.drain(30)
        assert [output async for output in stream][-1].finish_reason is FinishReason.LENGTH

    with_engine("process", story)


def test_the_death_of_an_engine_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: AsyncEngine) -> None:
        await engine.ready()
        with pytest.raises(EngineDead):
            _ = [output async for output in engine.submit(submit("a"))]
        assert "has died" in caplog.text and "a kernel broke" in caplog.text

    with_engine("thread", story, partial(load, 2))


def test_a_front_that_was_killed_ends_the_loop_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    messages, front = Pipe(duplex=False)
    front.close()
    news: list[News] = []
    run_loop(load, _PipeInbox(messages), news.append)
    assert [type(one) for one in news] == [Ready] and capsys.readouterr().err == ""


class SleepingInbox:
    """Passes virtual time instead of waiting; brings its messages only to one who would wait for ever."""

    def __init__(self, clock: VirtualClock, *messages: Message) -> None:
        self._clock, self._messages = clock, list(messages)
        self.waits: list[float | None] = []

    def drain(self, wait_seconds: float | None) -> Iterator[Message]:
        self.waits.append(wait_seconds)
        if wait_seconds is None:
            yield self._messages.pop(0)
        else:
            self._clock.advance(wait_seconds)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_loop_sleeps_until_a_waiting_batch_is_due_and_no_longer(is_stopping: bool) -> None:
    clock, news = VirtualClock(), []
    stage = Stage(replace(SETUP, regime="dynamic", batch_timeout_seconds=2.0))
    core = EngineCore(stage.scheduler, stage.executor, clock, EngineEvents(lambda listener, error: None))
    inbox = SleepingInbox(clock, submit("a", 3), Stop(is_graceful=True))
    if is_stopping:
        core.add(submit("b", 3))
    loaded = Loaded(core, Ready(max_model_len=200, num_blocks=64, block_size=4, fingerprint="shadow"))
    run_loop(lambda: loaded, inbox, news.append)
    assert inbox.waits[:2] == ([2.0, 0.0] if is_stopping else [None, 2.0])
    assert inbox.waits.count(2.0) == 1
    num_steps = sum(1 for one in news if isinstance(one, Outputs))
    assert num_steps == core.scheduler.stats().num_steps == (6 if is_stopping else 3)
