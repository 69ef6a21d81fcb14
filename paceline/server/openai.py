"""From an OpenAI request body to a Call that is ready to submit, and from finished choices to the answer's body.

A Call is complete: after it exists nothing about the request can be wrong. Decisions where servers differ:
max_tokens beyond the context is lowered (refused with strict_max_tokens); max_tokens 0 is served for completions with
echo, which gives the prompt back, and refused otherwise; a request without a seed gets one, kept in its SamplingParams.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..clock import Clock
from ..config import ServerConfig
from ..engine.messages import Submit
from ..errors import RequestError, Unsupported
from ..request import SamplingParams
from . import fields
from .engine_port import Engine, SeedSource, ServedModel
from .messages import num_chars_of, read_messages, render, turn_flags, unknown_message_keys
from .prompts import Prompt, off_loop, read_prompts, split_prompts
from .replies import HttpError

DEFAULT_COMPLETION_TOKENS = 16
KNOWN_COMPLETION = {*fields.COMPLETION, *fields.COMPLETION_SHAPED, *fields.COMPLETION_NEUTRAL, "best_of"}
KNOWN_CHAT = {*fields.CHAT, *fields.CHAT_SHAPED, *fields.CHAT_NEUTRAL, "best_of"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call, checked. Choice number = prompt number * num_choices + choice index."""

    is_chat: bool
    call_id: str
    created: int                        # unix seconds
    model_name: str                     # as the client spelled it
    fingerprint: str
    prompts: tuple[Prompt, ...]
    submits: tuple[Submit, ...]         # one a prompt; none when nothing is to be generated
    echoes: tuple[str, ...] | None      # the prompts' texts, to be sent before the generated text
    num_choices: int
    is_stream: bool
    wants_usage_chunk: bool
    ignored: tuple[str, ...]            # unknown fields, told in a header
    returns_token_ids: bool = False

    @property
    def object_name(self) -> str:
        if self.is_chat:
            return "chat.completion.chunk" if self.is_stream else "chat.completion"
        return "text_completion"


class CallReader:
    """Reads bodies into Calls, with what that takes beyond the body."""

    def __init__(
        self, engine: Engine, config: ServerConfig, model_names: Sequence[str], seed_source: SeedSource, clock: Clock
    ) -> None:
        self.engine = engine
        self.config = config
        self.model_names = tuple(model_names)
        self._seed_source = seed_source
        self._clock = clock

    async def completion(self, body: Mapping[str, Any]) -> Call:
        arrival_time, model = self._clock.now(), self.engine.model
        values = fields.read_fields(body, fields.COMPLETION)
        call = self._begin(body, values, fields.COMPLETION_NEUTRAL, KNOWN_COMPLETION)
        sampling = self._sampling(body, values, model)
        wanted = _wanted_tokens(values)
        if wanted == 0 and not values["echo"]:
            raise RequestError("max_tokens: must be at least 1 unless echo is true, got 0", "max_tokens")
        parts = split_prompts(body.get("prompt"), max(self.config.max_call_choices // values["n"], 1))
        prompts = await read_prompts(parts, model, values["add_special_tokens"])
        if values["echo"]:
            call = replace(call, echoes=tuple(_echo(one, model) for one in prompts))
        if wanted == 0:
            return replace(call, prompts=prompts)
        lengths = [self._max_tokens(wanted, DEFAULT_COMPLETION_TOKENS, one, model) for one in prompts]
        call = replace(call, prompts=prompts)
        return _with_submits(call, [replace(sampling, max_tokens=one) for one in lengths], values, arrival_time)

    async def chat(self, body: Mapping[str, Any]) -> Call:
        arrival_time, model = self._clock.now(), self.engine.model
        values = fields.read_fields(body, fields.CHAT)
        call = self._begin(body, values, fields.CHAT_NEUTRAL, KNOWN_CHAT)
        sampling = self._sampling(body, values, model)
        wanted = _wanted_tokens(values)
        if wanted == 0:
            raise RequestError("max_tokens: must be at least 1, got 0", "max_tokens")
        messages = read_messages(body.get("messages"))
        unknown = unknown_message_keys(body["messages"], self.config.strict_fields)
        prompt = await self._chat_prompt(messages, values, model)
        length = self._max_tokens(wanted, model.max_model_len, prompt, model)
        call = replace(call, is_chat=True, prompts=(prompt,), ignored=call.ignored + unknown)
        return _with_submits(call, [replace(sampling, max_tokens=length)], values, arrival_time)

    def served_name(self, name: str | None) -> str:
        """The name to answer under; a model that is not served is a 404."""
        if name is None:
            return self.model_names[0]
        self.check_name(name)
        return name

    def check_name(self, name: str) -> None:
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"the model {name[:200]!r} is not served here; served: {served}"
            raise HttpError(404, message, "model_not_found", "model")

    def _begin(
        self, body: Mapping[str, Any], values: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], known: set[str]
    ) -> Call:
        """Everything but the prompts: names, flags, and the refusal of what is not served."""
        model_name = self.served_name(values["model"])
        fields.refuse_unsupported(body, neutral)
        fields.check_best_of(body, values["n"])
        if values["priority"] and not self.engine.model.reads_priority:
            raise Unsupported("priority: not looked at here; a server with --ordering priority does", "priority")
        if values["n"] > (most := self.config.max_call_choices):
            raise RequestError(f"n: at most {most} choices fit the queue here, got {values['n']}", "n")
        is_chat = known is KNOWN_CHAT
        return Call(
            is_chat=is_chat,
            call_id=("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex,
            created=int(time.time()),
            model_name=model_name,
            fingerprint=self.engine.model.fingerprint,
            prompts=(),
            submits=(),
            echoes=None,
            num_choices=values["n"],
            is_stream=values["stream"],
            wants_usage_chunk=fields.read_stream_options(body, values["stream"]),
            ignored=fields.unknown_fields(body, known, self.config.strict_fields),
            returns_token_ids=values["return_token_ids"],
        )

    def _sampling(self, body: Mapping[str, Any], values: dict[str, Any], model: ServedModel) -> SamplingParams:
        top_k, top_p = values["top_k"], values["top_p"]
        seed = values["seed"]
        return SamplingParams(
            max_tokens=1,    # replaced when the prompt's length is known
            temperature=values["temperature"],
            top_k=1 if top_p == 0 else None if top_k is None or top_k <= 0 else min(top_k, model.vocab_size),
            top_p=1.0 if top_p == 0 else top_p,
            seed=self._seed_source() if seed is None else seed,
            stop=fields.read_stop(body.get("stop")),
            stop_token_ids=fields.read_stop_token_ids(body.get("stop_token_ids"), model.vocab_size),
            ignore_eos=values["ignore_eos"],
        )

    async def _chat_prompt(
        self, messages: list[dict[str, Any]], values: Mapping[str, Any], model: ServedModel
    ) -> Prompt:
        template = model.chat_template
        if template is None:
            message = "messages: this model has no chat template; send a prompt to /v1/completions instead"
            raise RequestError(message, "messages", "no_chat_template")
        flags = turn_flags(messages, values["add_generation_prompt"], values["continue_final_message"])
        text = await off_loop(num_chars_of(messages), lambda: render(template, messages, flags))
        return (await read_prompts([text], model, values["add_special_tokens"], "messages"))[0]

    def _max_tokens(self, wanted: int | None, default: int, prompt: Prompt, model: ServedModel) -> int:
        """What was asked for, at most what the context leaves."""
        room = model.max_model_len - len(prompt.token_ids)
        if wanted is None:
            return min(default, room)
        if wanted > room and self.config.strict_max_tokens:
            raise RequestError(
                f"max_tokens: {wanted} is longer than the room left: the prompt has {len(prompt.token_ids)} tokens, "
                f"and prompt and output together are limited to {model.max_model_len}", "max_tokens",
                "context_length_exceeded")
        return min(wanted, room)


def _wanted_tokens(values: Mapping[str, Any]) -> int | None:
    wanted: int | None = values["max_completion_tokens"]
    return values["max_tokens"] if wanted is None else wanted


def _echo(prompt: Prompt, model: ServedModel) -> str:
    return model.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


def _with_submits(
    call: Call, sampling: Sequence[SamplingParams], values: Mapping[str, Any], arrival_time: float
) -> Call:
    salt = values["cache_salt"]
    submits = [
        Submit(
            request_id=call.call_id if len(call.prompts) == 1 else f"{call.call_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=params,
            arrival_time=arrival_time,
            tenant=values["user"] or "default",
            priority=values["priority"],
            deadline=None if values["timeout"] is None else arrival_time + values["timeout"],
            cache_extras=() if salt is None else (f"salt:{salt}",),
            prompt_index=index,
            num_choices=call.num_choices,
        )
        for index, (prompt, params) in enumerate(zip(call.prompts, sampling, strict=True))
    ]
    return replace(call, submits=tuple(submits))


def usage_of(call: Call, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in call.prompts)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def answer_of(call: Call, texts: Sequence[tuple[str, str]], usage: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer in one piece, from each choice's text and finish reason."""
    choices = [_choice(call.is_chat, index, text, reason) for index, (text, reason) in enumerate(texts)]
    return {
        "id": call.call_id,
        "object": call.object_name,
        "created": call.created,
        "model": call.model_name,
        "system_fingerprint": call.fingerprint,
        "choices": choices,
        "usage": usage,
    }


def _choice(is_chat: bool, index: int, text: str, reason: str) -> dict[str, Any]:
    if is_chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
