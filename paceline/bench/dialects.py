"""What the servers speak: how a request is said and how the events of its answer are read.

A chunk is not a token. Its tokens are counted by the ids it carries, by a usage that grows with the chunks, or by the
usage at the end; see Call for what is done where a server tells none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .call import Call
from .records import Asked

# What goes beyond the plain protocols; a server that refuses one of them is asked without it. In the order of leaving.
COUNTS_IN_CHUNKS = ("continuous_usage_stats", "return_token_ids")    # cost the server work in every chunk
EXTENSIONS = ("continuous_usage_stats", "return_token_ids", "min_tokens", "ignore_eos", "include_usage")


@dataclass(frozen=True, slots=True)
class Dialect:
    path: str                                                    # behind the API's root (/v1); TGI: the server's
    forms: tuple[str, ...]                                       # of prompts it takes, the best first
    extensions: tuple[str, ...]
    body: Callable[[Asked, str, Collection[str]], dict[str, Any]]    # request, model, extensions in use
    read: Callable[[Mapping[str, Any], Call, float], None]       # event, where to note it, when it came
    ends_with_done: bool = True                                  # a last event [DONE]


def form_of(asked: Asked) -> str:
    return "ids" if asked.prompt_token_ids is not None else "messages" if asked.messages is not None else "text"


def openai_body(asked: Asked, model: str, extensions: Collection[str]) -> dict[str, Any]:
    """Greedy, of exactly the asked length as far as the server lets itself be told."""
    body: dict[str, Any] = {"model": model, "max_tokens": asked.num_output_tokens, "temperature": 0, "stream": True}
    if "ignore_eos" in extensions:
        body["ignore_eos"] = True
    if "min_tokens" in extensions:
        body["min_tokens"] = asked.num_output_tokens
    if "return_token_ids" in extensions:
        body["return_token_ids"] = True
    if "include_usage" in extensions:
        body["stream_options"] = {"include_usage": True}
        if "continuous_usage_stats" in extensions:
            body["stream_options"]["continuous_usage_stats"] = True
    return body


def completions_body(asked: Asked, model: str, extensions: Collection[str]) -> dict[str, Any]:
    if asked.messages is not None:
        raise ConfigError(f"{asked.request_id} is a chat: ask the target's /v1/chat/completions (protocol chat)")
    prompt = asked.prompt if asked.prompt_token_ids is None else asked.prompt_token_ids
    return {"prompt": prompt} | openai_body(asked, model, extensions)


def chat_body(asked: Asked, model: str, extensions: Collection[str]) -> dict[str, Any]:
    if asked.prompt_token_ids is not None:
        raise ConfigError(f"{asked.request_id} is made of token ids, which chats do not take: use prompts messages")
    messages = asked.messages or ({"role": "user", "content": asked.prompt},)
    return {"messages": messages} | openai_body(asked, model, extensions)


def tgi_body(asked: Asked, model: str, extensions: Collection[str]) -> dict[str, Any]:
    if asked.prompt is None:
        raise ConfigError(f"{asked.request_id} is not a text, the only prompt that TGI takes: use prompts text")
    return {"inputs": asked.prompt, "parameters": {"max_new_tokens": asked.num_output_tokens, "details": True}}


def read_openai(event: Mapping[str, Any], call: Call, at: float) -> None:
    """Completions and chats alike."""
    if error := event.get("error"):
        return call.fail("http_error", _words(error))
    num_before = call.output_tokens or 0
    if usage := event.get("usage"):
        call.usage(usage)
    if (cached := (event.get("timings") or {}).get("cache_n")) is not None:    # llama.cpp's own word for it
        call.cached_tokens = cached
    for choice in (event.get("choices") or ())[:1]:
        call.finish_reason = choice.get("finish_reason") or call.finish_reason
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            if ids:
                call.chunk(at, len(ids), "token_ids")
        elif usage and (call.counted_by == "usage" or not call.chunk_times or choice.get("finish_reason") is None):
            # Not a usage that only the last of several chunks has: it is the whole answer's.
            if (count := (call.output_tokens or 0) - num_before) > 0:
                call.chunk(at, count, "usage")
        elif _has_tokens(choice):
            call.chunk(at, None)


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """Text, or an unfinished chunk without any: a token that is a part of a character. A chat's first chunk has only
    the role, with text that is empty."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
        return True
    return choice.get("finish_reason") is None and "role" not in delta


def read_tgi(event: Mapping[str, Any], call: Call, at: float) -> None:
    """An event a token. The last one has the whole text and the details."""
    if error := event.get("error"):
        return call.fail("http_error", _words(error))
    if event.get("token"):
        call.chunk(at, 1, "token_ids")
    details = event.get("details") or {}
    call.output_tokens = details.get("generated_tokens", call.output_tokens)
    call.finish_reason = details.get("finish_reason", call.finish_reason)
    if event.get("generated_text") is not None:
        call.end(at)


def _words(error: Any) -> str:
    """What an error says, in whichever of its usual forms."""
    if isinstance(error, Mapping):
        return str(error.get("message") or error)
    return str(error)


DIALECTS: dict[str, Dialect] = {
    "completions": Dialect("/completions", ("ids", "text"), EXTENSIONS, completions_body, read_openai),
    "chat": Dialect("/chat/completions", ("messages", "text"), EXTENSIONS, chat_body, read_openai),
    "tgi": Dialect("/generate_stream", ("text",), (), tgi_body, read_tgi, ends_with_done=False),
}
