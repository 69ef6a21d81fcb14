"""An engine that really runs on the event loop but whose tokens are scripted. One token a step for every choice.

A test may hold it (nothing steps until released), kill it, or ask for one step. It keeps what it was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.clock import WallClock
from paceline.engine.detokenizer import OutputText
from paceline.engine.messages import Answer, EngineStats, Outputs, Question, RequestOutput, RequestTimeline, Submit
from paceline.engine.queue_limits import Load, QueueGate, QueueLimits
from paceline.errors import EngineDead, RequestError
from paceline.model.chat_template import ChatTemplate
from paceline.model.dummy import DUMMY_CHAT_TEMPLATE, END_TOKEN_ID, dummy_tokenizer
from paceline.model.tokenizer import Tokenizer
from paceline.request import FinishReason, StopMatch
from paceline.sched.plan import ScoredToken

PANGRAM = b"the quick brown fox jumps over the lazy dog and "
NUM_BLOCKS = 100
QUEUE_LIMITS = QueueLimits(max_choices=1024)


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    tokenizer: Tokenizer = field(default_factory=lambda: dummy_tokenizer(300))
    chat_template: ChatTemplate | None = field(default_factory=lambda: ChatTemplate(DUMMY_CHAT_TEMPLATE))
    max_model_len: int = 256
    vocab_size: int = 300
    eos_token_ids: frozenset[int] = frozenset({END_TOKEN_ID})
    fingerprint: str = "fake-f32"
    reads_priority: bool = True


Script = Callable[[Submit, int, int], int]


def logprob_of(token_id: int) -> float:
    """What the fake model thinks of a token, wherever it stands: 97 (a) is the likeliest, the rest by distance."""
    if token_id == END_TOKEN_ID:
        return -1.0
    return -0.25 * (1 + abs(token_id - ord("a")))


def best_tokens(num_top: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(range(300), key=lambda token_id: (-logprob_of(token_id), token_id))
    return tuple((token_id, logprob_of(token_id)) for token_id in ranked[:num_top])


def pangram_script(submit: Submit, choice_index: int, position: int) -> int:
    """Endless text. Where it starts depends, at a temperature, on the seed and the choice."""
    start = 0 if submit.sampling.temperature == 0 else submit.sampling.seed * 7 + choice_index * 5
    return PANGRAM[(start + len(submit.prompt_token_ids) + position) % len(PANGRAM)]


def saying(text: str | bytes, *, ends: bool = True) -> Script:
    """Every choice says this, then stops (or starts again)."""
    tokens = [*(text.encode() if isinstance(text, str) else text), *([END_TOKEN_ID] if ends else [])]
    return lambda submit, choice_index, position: tokens[position % len(tokens)]


class FakeStream:
    def __init__(self, engine: FakeEngine, request_id: str, num_choices: int) -> None:
        self._engine = engine
        self._request_id = request_id
        self._num_left = num_choices
        self._queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, news: RequestOutput | Exception) -> None:
        self._queue.put_nowait(news)

    def close(self) -> None:
        self._queue.put_nowait(StopAsyncIteration())

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._num_left == 0:
            raise StopAsyncIteration
        news = await self._queue.get()
        if isinstance(news, Exception):
            raise news
        self._num_left -= news.finish_reason is not None
        return news

    def abort(self) -> None:
        self._engine.abort(self._request_id)


@dataclass
class FakeChoice:
    submit: Submit
    index: int
    text: OutputText
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float | None = None

    @property
    def request_id(self) -> str:
        return self.submit.request_id if self.index == 0 else f"{self.submit.request_id}:{self.index}"


class FakeEngine:
    def __init__(self, *, limits: QueueLimits = QUEUE_LIMITS, model: FakeModel | None = None) -> None:
        self.model = model or FakeModel()
        self.state = "ready"
        self.stats: EngineStats | None = None
        self.policy = None
        self.script: Script = pangram_script
        self.num_cached_tokens = 0
        self.has_stalled = False
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.submit_error: Exception | None = None
        self._limits = limits
        self._gate_keeper = QueueGate(limits)
        self._clock = WallClock()
        self._running: dict[str, FakeChoice] = {}
        self._streams: dict[str, FakeStream] = {}
        self._listeners: list[Callable[[Outputs], None]] = []
        self._gate = asyncio.Event()
        self._gate.set()
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._num_steps = self._num_prompt_tokens = self._num_generated = 0
        self._loop_task = asyncio.ensure_future(self._run())

    # ---- the interface of AsyncEngine

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, message: Submit) -> FakeStream:
        if self.state in ("dead", "stopped"):
            raise EngineDead("the engine loop has stopped")
        if self.submit_error is not None:
            raise self.submit_error
        load = Load(message.tenant, message.num_choices, len(message.prompt_token_ids))
        self._gate_keeper.check(load, self._clock.now())
        self._gate_keeper.enter(load)
        self.submitted.append(message)
        stream = FakeStream(self, message.request_id, message.num_choices)
        for index in range(message.num_choices):
            text = OutputText.of(self.model.tokenizer, message.sampling)
            choice = FakeChoice(message, index, text)
            self._running[choice.request_id] = choice
            self._streams[choice.request_id] = stream
        self._num_prompt_tokens += len(message.prompt_token_ids)
        self._work.set()
        self._changed.set()
        return stream

    async def ask(self, question: Question) -> Answer:
        raise RequestError("this engine runs by no policies")

    def check_room(self) -> None:
        self._gate_keeper.check_any(self._clock.now())

    async def until_dead(self) -> None:
        await self.until(lambda: self.state == "dead")

    def is_stalled(self, limit_seconds: float) -> bool:
        return self.has_stalled

    def add_listener(self, on_outputs: Callable[[Outputs], None]) -> None:
        self._listeners.append(on_outputs)

    async def drain(self, grace_seconds: float) -> None:
        if self.state == "ready":
            self.state = "draining"
        self._changed.set()
        try:
            async with asyncio.timeout(grace_seconds):
                await self.until(lambda: not self._running)
        except TimeoutError:
            pass

    async def stop(self) -> None:
        self.state = "stopped"
        self._loop_task.cancel()

    # ---- what a test does with it

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def die(self, reason: str = "the step raised") -> None:
        self.state = "dead"
        self._loop_task.cancel()
        for stream in set(self._streams.values()):
            stream.put(EngineDead(reason))
        self._forget_all()

    def close_all(self) -> None:
        """Ends the streams without a word."""
        for stream in set(self._streams.values()):
            stream.close()
        self._forget_all()

    def _forget_all(self) -> None:
        self._running.clear()
        self._streams.clear()
        self._gate_keeper = QueueGate(self._limits)
        self._changed.set()

    def finish_all(self, reason: FinishReason) -> None:
        self._deliver([self._ended(choice, (), reason) for choice in tuple(self._running.values())])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        mine = [one for one in self._running.values() if one.submit.request_id == request_id]
        self._deliver([self._ended(choice, (), FinishReason.ABORT) for choice in mine])

    async def until(self, predicate: Callable[[], Any]) -> None:
        """Returns when the predicate holds, looking whenever something happened here."""
        while not predicate():
            self._changed.clear()
            await self._changed.wait()

    def step(self) -> None:
        outputs = []
        for choice in tuple(self._running.values()):
            if choice.index == 0 and not choice.token_ids:
                outputs += self._prompt_scores(choice)
            outputs.append(self._next_token(choice))
        self._num_steps += 1
        self._deliver(outputs, num_tokens=len(outputs))

    # ---- the loop

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self._gate.wait()
            if self._running:
                self.step()
            else:
                self._work.clear()
            await asyncio.sleep(0)

    def _next_token(self, choice: FakeChoice) -> RequestOutput:
        params = choice.submit.sampling
        token_id = self.script(choice.submit, choice.index, len(choice.token_ids))
        choice.token_ids.append(token_id)
        choice.first_token_at = choice.first_token_at or self._clock.now()
        self._num_generated += 1
        choice.text.push((token_id,))
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids)}
        match = choice.text.find_stop()
        if token_id in stop_ids:
            match = StopMatch(token_id=token_id)
        if match is not None:
            return self._ended(choice, (token_id,), FinishReason.STOP, match)
        if len(choice.token_ids) == params.max_tokens:
            return self._ended(choice, (token_id,), FinishReason.LENGTH)
        return self._news(choice, (token_id,))

    def _prompt_scores(self, choice: FakeChoice) -> list[RequestOutput]:
        """In two pieces, as of a prompt that ran in two chunks."""
        num_top = choice.submit.sampling.prompt_logprobs
        if num_top is None:
            return []
        scored = [ScoredToken(token_id, logprob_of(token_id), best_tokens(num_top))
                  for token_id in choice.submit.prompt_token_ids[1:]]
        return [self._news(choice, (), prompt_logprobs=tuple(piece)) for piece in (scored[:2], scored[2:]) if piece]

    def _news(self, choice: FakeChoice, token_ids: tuple[int, ...], **more: Any) -> RequestOutput:
        asked = choice.submit.sampling
        if asked.logprobs is not None:
            more["logprobs"] = tuple(map(logprob_of, token_ids))
            more["top_logprobs"] = (best_tokens(asked.logprobs),) * len(token_ids) if asked.logprobs else None
        return RequestOutput(
            request_id=choice.request_id, choice_index=choice.index, token_ids=token_ids,
            num_prompt_tokens=len(choice.submit.prompt_token_ids), num_cached_tokens=self.num_cached_tokens, **more)

    def _ended(
        self, choice: FakeChoice, token_ids: tuple[int, ...], reason: FinishReason, stop: StopMatch | None = None
    ) -> RequestOutput:
        del self._running[choice.request_id]
        is_last = all(one.submit is not choice.submit for one in self._running.values())
        num_tokens = len(choice.submit.prompt_token_ids) if is_last else 0
        self._gate_keeper.leave(Load(choice.submit.tenant, 1, num_tokens), self._clock.now())
        arrived_at = choice.submit.arrival_time
        timeline = RequestTimeline(
            arrived_at=arrived_at, first_scheduled_at=arrived_at if choice.token_ids else None,
            first_token_at=choice.first_token_at, finished_at=self._clock.now(), num_preemptions=0)
        return self._news(choice, token_ids, finish_reason=reason, stop=stop, timeline=timeline)

    def _deliver(self, outputs: Iterable[RequestOutput], num_tokens: int = 0) -> None:
        outputs = tuple(outputs)
        for output in outputs:
            is_end = output.finish_reason is not None
            stream = self._streams.pop(output.request_id) if is_end else self._streams[output.request_id]
            stream.put(output)
        self._tell(outputs, num_tokens)

    def _tell(self, outputs: tuple[RequestOutput, ...], num_tokens: int) -> None:
        num_held = min(self.num_unfinished, NUM_BLOCKS)
        self.stats = EngineStats(
            num_running=self.num_unfinished, num_waiting=0, num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - num_held, num_cached_blocks=0, num_preemptions=0, num_steps=self._num_steps,
            num_prompt_tokens_computed=self._num_prompt_tokens, num_generation_tokens=self._num_generated,
            prefix_cache_queries=self._num_prompt_tokens, prefix_cache_hits=0, num_recomputed_tokens=0)
        for listener in self._listeners:
            listener(Outputs(outputs, self.stats, num_tokens))
        self._changed.set()
