"""From an OpenAI request body to a Call that is ready to submit, and from finished choices to the answer's body.

A Call is complete: after it exists nothing about the request can be wrong. Decisions where servers differ:
max_tokens beyond the context is lowered (refused with strict_max_tokens); max_tokens 0 is served for completions with
echo, which gives the prompt back (with its log-probabilities, if asked for: the one token that this takes is dropped
and not counted), and refused otherwise; a request without a seed gets one, kept in its SamplingParams. The tokens of
all best_of choices count as completion tokens.
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
from ..engine.sampling import bad_word_tokens, check_best_of, truncated
from ..errors import ModelError, RequestError, Unsupported
from ..model.chat_template import ChatTemplate, require_chat_template
from ..request import SamplingParams, check_sampling
from . import fields
from .engine_port import Engine, SeedSource, ServedModel
from .messages import (
    num_chars_of,
    read_messages,
    read_variables,
    turn_flags,
    unknown_message_keys,
    unread_variables,
)
from .prompts import Cut, Prompt, off_loop, read_prompts, split_prompts
from .replies import HttpError

DEFAULT_COMPLETION_TOKENS = 16
SAME_NAMED = (    # fields that are SamplingParams' own
    "min_tokens", "temperature", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
KNOWN_COMPLETION = {*fields.COMPLETION, *fields.COMPLETION_SHAPED, *fields.COMPLETION_NEUTRAL}
KNOWN_CHAT = {*fields.CHAT, *fields.CHAT_SHAPED, *fields.CHAT_NEUTRAL}


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
    num_candidates: int                 # choices to generate, num_choices of which are answered
    num_top_logprobs: int | None        # best tokens to tell beside each one; None: no log-probabilities
    skips_special_tokens: bool
    is_echo_only: bool                  # what is generated, if anything, is dropped
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
        wanted = _wanted_tokens(values)
        if wanted == 0 and not values["echo"]:
            raise RequestError("max_tokens: must be at least 1 unless echo is true, got 0", "max_tokens")
        asked = DEFAULT_COMPLETION_TOKENS if wanted is None else max(wanted, 1)
        sampling = await self._sampling(body, values, asked)
        if values["echo"] and call.num_top_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=call.num_top_logprobs)
        parts = split_prompts(body.get("prompt"), max(self.config.max_call_choices // call.num_candidates, 1))
        cut = _cutter(values, model, asked)
        prompts = await read_prompts(parts, model, values["add_special_tokens"], cut=cut)
        call = replace(call, prompts=prompts, is_echo_only=wanted == 0)
        if values["echo"]:
            skips = values["skip_special_tokens"]
            call = replace(call, echoes=tuple(_echo(one, model, skips) for one in prompts))
        if wanted == 0 and call.num_top_logprobs is None:
            return call
        lengths = [self._max_tokens(asked, wanted is not None, one, model) for one in prompts]
        return _with_submits(call, [replace(sampling, max_tokens=one) for one in lengths], values, arrival_time)

    async def chat(self, body: Mapping[str, Any]) -> Call:
        arrival_time, model = self._clock.now(), self.engine.model
        values = fields.read_fields(body, fields.CHAT)
        call = self._begin(body, values, fields.CHAT_NEUTRAL, KNOWN_CHAT)
        wanted = _wanted_tokens(values)
        if wanted == 0:
            raise RequestError("max_tokens: must be at least 1, got 0", "max_tokens")
        sampling = await self._sampling(body, values, model.max_model_len if wanted is None else wanted)
        messages = read_messages(body.get("messages"))
        unknown = unknown_message_keys(body["messages"], self.config.strict_fields)
        template = await self._template(values["chat_template"], model)
        variables = read_variables(values["chat_template_kwargs"])
        unknown += unread_variables(variables, template, self.config.strict_fields)
        prompt = await _chat_prompt(messages, values, template, model)
        length = self._max_tokens(wanted or model.max_model_len, wanted is not None, prompt, model)
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
        num_candidates = check_best_of(values["best_of"], values["n"])
        if num_candidates > values["n"] and values["stream"]:
            raise RequestError("best_of: not with stream: the choice is made at the end", "best_of")
        if values["priority"] and not self.engine.model.reads_priority:
            raise Unsupported("priority: not looked at here; a server with --ordering priority does", "priority")
        if num_candidates > (most := self.config.max_call_choices):
            name = "n" if num_candidates == values["n"] else "best_of"
            message = f"{name}: at most {most} choices fit the queue here, got {num_candidates}"
            raise RequestError(message, name)
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
            num_candidates=num_candidates,
            num_top_logprobs=fields.num_top_logprobs(values),
            skips_special_tokens=values["skip_special_tokens"],
            is_echo_only=False,
            is_stream=values["stream"],
            wants_usage_chunk=fields.read_stream_options(body, values["stream"]),
            ignored=fields.unknown_fields(body, known, self.config.strict_fields),
            returns_token_ids=values["return_token_ids"],
        )

    async def _sampling(self, body: Mapping[str, Any], values: dict[str, Any], max_tokens: int) -> SamplingParams:
        """Complete but for max_tokens, which is lowered when the prompt's length is known."""
        model = self.engine.model
        top_k, top_p, seed = values["top_k"], values["top_p"], values["seed"]
        words = fields.read_bad_words(body.get("bad_words"))
        bad_words = await off_loop(8 * sum(map(len, words)), lambda: bad_word_tokens(words, model.tokenizer))
        num_top = fields.num_top_logprobs(values)
        ranks = values["best_of"] is not None and values["best_of"] > values["n"]
        params = SamplingParams(
            **{name: values[name] for name in SAME_NAMED},
            max_tokens=max_tokens,
            top_k=1 if top_p == 0 else None if top_k is None or top_k <= 0 else min(top_k, model.vocab_size),
            top_p=1.0 if top_p == 0 else top_p,
            seed=self._seed_source() if seed is None else seed,
            logit_bias=fields.read_logit_bias(body.get("logit_bias"), model.vocab_size),
            allowed_token_ids=fields.read_allowed_token_ids(body.get("allowed_token_ids"), model.vocab_size),
            bad_words=bad_words,
            stop=fields.read_stop(body.get("stop")),
            stop_token_ids=fields.read_stop_token_ids(body.get("stop_token_ids"), model.vocab_size),
            logprobs=0 if num_top is None and ranks else num_top,
        )
        check_sampling(params, model.vocab_size)
        return params

    async def _template(self, source: str | None, model: ServedModel) -> ChatTemplate:
        """The server's chat template, or the request's own where those are trusted."""
        if source is None:
            return require_chat_template(model.chat_template)
        if not self.config.trust_request_chat_template:
            message = "not supported here; a server with --trust-request-chat-template takes it"
            raise Unsupported(f"chat_template: {message}", "chat_template")
        try:
            return await off_loop(len(source), lambda: ChatTemplate(
                source, model.tokenizer.special_tokens, where="chat_template"))
        except ModelError as error:
            raise RequestError(str(error), "chat_template") from error

    def _max_tokens(self, wanted: int, is_asked_for: bool, prompt: Prompt, model: ServedModel) -> int:
        """What was asked for, or the default, at most what the context leaves."""
        room = model.max_model_len - len(prompt.token_ids)
        if is_asked_for and wanted > room and self.config.strict_max_tokens:
            raise RequestError(
                f"max_tokens: {wanted} is longer than the room left: the prompt has {len(prompt.token_ids)} tokens, "
                f"and prompt and output together are limited to {model.max_model_len}", "max_tokens",
                "context_length_exceeded")
        return min(wanted, room)


async def _chat_prompt(
    messages: list[dict[str, Any]], values: Mapping[str, Any], template: ChatTemplate, model: ServedModel
) -> Prompt:
    opens_turn, continues = turn_flags(messages, values["add_generation_prompt"], values["continue_final_message"])
    variables = values["chat_template_kwargs"]
    text = await off_loop(
        num_chars_of(messages), lambda: template.render(messages, opens_turn, None, variables, continues))
    cut = _cutter(values, model, _wanted_tokens(values) or 1)
    return (await read_prompts([text], model, values["add_special_tokens"], "messages", cut))[0]


def _wanted_tokens(values: Mapping[str, Any]) -> int | None:
    wanted: int | None = values["max_completion_tokens"]
    return values["max_tokens"] if wanted is None else wanted


def _echo(prompt: Prompt, model: ServedModel, skip_special_tokens: bool) -> str:
    return model.tokenizer.decode(prompt.token_ids, skip_special_tokens) if prompt.text is None else prompt.text


def _cutter(values: Mapping[str, Any], model: ServedModel, max_tokens: int) -> Cut | None:
    num_kept = values["truncate_prompt_tokens"]
    if num_kept is None:
        return None
    return lambda token_ids: truncated(token_ids, num_kept, model.max_model_len, max_tokens)


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
            num_choices=call.num_candidates,
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice as it is told."""

    text: str
    finish_reason: str
    logprobs: Mapping[str, Any] | None = None


def answer_of(call: Call, answers: Sequence[Answer], usage: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer in one piece."""
    return {
        "id": call.call_id,
        "object": call.object_name,
        "created": call.created,
        "model": call.model_name,
        "system_fingerprint": call.fingerprint,
        "choices": [_choice(call.is_chat, index, answer) for index, answer in enumerate(answers)],
        "usage": usage,
    }


def _choice(is_chat: bool, index: int, answer: Answer) -> dict[str, Any]:
    rest = {"logprobs": answer.logprobs, "finish_reason": answer.finish_reason}
    if is_chat:
        return {"index": index, "message": {"role": "assistant", "content": answer.text, "refusal": None}, **rest}
    return {"index": index, "text": answer.text, **rest}
