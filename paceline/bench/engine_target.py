"""An engine of this package under load without HTTP: what the scheduler and the kernels do, and nothing else.

The engine loop runs in a thread or process of its own (its transport); the client is this event loop. Nothing is
turned into text: times are those of token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from ..clock import Clock
from ..engine.async_engine import AsyncEngine
from ..engine.messages import Submit
from ..errors import ConfigError, EngineDead, Overloaded, RequestError
from ..request import SamplingParams
from .call import Call
from .dialects import form_of
from .records import Asked


class EngineTarget:
    """Around an AsyncEngine that is ready, and the clock it was made with. Whoever made the engine stops it."""

    forms = ("ids", "text", "messages")

    def __init__(self, engine: AsyncEngine, clock: Clock, name: str, about: Mapping[str, Any]) -> None:
        self.name = name
        self._clock = clock
        self._engine = engine
        self._about = dict(about)
        self._numbers = count()

    def about(self) -> dict[str, Any]:
        return self._about

    async def __aenter__(self) -> EngineTarget:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    @property
    def vocab_size(self) -> int:
        return self._engine.model.vocab_size

    @property
    def max_context(self) -> int:
        return self._engine.model.max_model_len

    def prepare(self, asked: Asked) -> Submit:
        token_ids = self._token_ids(asked)
        if wrong := [token_id for token_id in token_ids if token_id >= self.vocab_size]:
            raise ConfigError(f"{asked.request_id}: token id {wrong[0]} is not in the vocabulary of {self.vocab_size}")
        if (num_tokens := len(token_ids) + asked.num_output_tokens) > self.max_context:
            raise ConfigError(f"{asked.request_id}: {num_tokens} tokens of prompt and output; the limit here is "
                              f"{self.max_context} (cut prompts with --max-context, or raise the engine's limits)")
        sampling = SamplingParams(max_tokens=asked.num_output_tokens, temperature=0.0, ignore_eos=True)
        return Submit(request_id=f"{asked.request_id}-{next(self._numbers)}", prompt_token_ids=token_ids,
                      sampling=sampling, arrival_time=0.0, tenant=asked.tenant or "default")

    def _token_ids(self, asked: Asked) -> tuple[int, ...]:
        model = self._engine.model
        match form_of(asked):
            case "ids":
                return asked.prompt_token_ids or ()
            case "text":
                return tuple(model.tokenizer.encode(asked.prompt))
        if model.chat_template is None:
            raise ConfigError(f"{asked.request_id} is a chat, and this model has no chat template: use prompts ids")
        text = model.chat_template.render(list(asked.messages or ()), True)
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    async def send(self, prepared: Submit, call: Call) -> None:
        call.sent_at = call.clock()
        try:
            await self._follow(prepared, call)
        except Overloaded as error:
            call.fail("refused", str(error))
        except RequestError as error:
            call.fail("http_error", str(error))
        except EngineDead as error:
            call.fail("dropped", str(error))
        finally:
            if call.ended_at is None:
                call.ended_at = call.clock()

    async def _follow(self, prepared: Submit, call: Call) -> None:
        stream = self._engine.submit(replace(prepared, arrival_time=self._clock.now()))
        call.prompt_tokens, call.output_tokens = len(prepared.prompt_token_ids), 0
        try:
            async for output in stream:
                at = call.clock()
                if output.token_ids:
                    call.chunk(at, len(output.token_ids), "token_ids")
                    call.output_tokens += len(output.token_ids)
                call.cached_tokens = output.num_cached_tokens
                if output.finish_reason is not None:
                    call.finish_reason = output.finish_reason.value
                    call.preemptions = output.timeline.num_preemptions if output.timeline else None
                    call.end(at)
        finally:
            stream.abort()    # harmless once it has finished

    async def counters(self) -> dict[str, int]:
        stats = self._engine.stats
        if stats is None:
            return {"prefix_cache_hits": 0, "prefix_cache_queries": 0, "num_preemptions": 0}
        return {name: getattr(stats, name) for name in ("prefix_cache_hits", "prefix_cache_queries", "num_preemptions")}
