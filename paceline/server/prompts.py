"""Prompts to token ids: every shape a client may send, bounded before any work is done, long ones off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import PromptTooLong, RequestError
from .engine_port import ServedModel
from .fields import check_token_ids
from .replies import shown

MAX_INLINE_CHARS = 2048          # shorter text is tokenised on the event loop: about a millisecond
FALLBACK_TOKEN_CHARS = 512       # characters one token may stand for, when the tokenizer does not tell
T = TypeVar("T")
Cut = Callable[[tuple[int, ...]], tuple[int, ...]]    # what is left of a prompt

# Two, so that one long prompt does not hold up the next, and no more: the cores belong to the model.
WORKERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="paceline-tokenise")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the client sent, None when it sent ids or the prompt was cut."""

    token_ids: tuple[int, ...]
    text: str | None = None


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Runs work, in a thread if there is much of it."""
    if num_chars <= MAX_INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(WORKERS, work)


def split_prompts(value: Any, max_prompts: int) -> list[str | list[Any]]:
    """The prompt field as a list of texts and id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"prompt: must be a string, a list of strings, or token ids, got {shown(value)}", "prompt")
    if not value:
        raise RequestError("prompt: must not be an empty list", "prompt")
    if not isinstance(value[0], str | list):
        return [value]                         # ids; what is no id is refused when they are checked
    if len(value) > max_prompts:
        raise RequestError(f"prompt: at most {max_prompts} prompts in one call here, got {len(value)}", "prompt")
    for one in value:
        if not isinstance(one, str | list):
            raise RequestError(f"prompt: a list of prompts cannot contain {shown(one)}", "prompt")
    return value


async def read_prompts(
    parts: Sequence[str | list[Any]], model: ServedModel, add_special_tokens: bool, param: str = "prompt",
    cut: Cut | None = None,
) -> tuple[Prompt, ...]:
    """All prompts of a call, cut where that is asked for, then checked against the context limit. param: the field they
    come from."""
    num_chars = 0
    for part in parts:
        if isinstance(part, str):
            if cut is None:
                check_chars(part, model, param)
            num_chars += len(part)
        else:
            if cut is None:
                check_length(len(part), model, param)
            check_token_ids(param, part, model.vocab_size)
    encode = model.tokenizer.encode
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(await off_loop(num_chars, lambda: [encode(text, add_special_tokens) for text in texts]))
    prompts = tuple(Prompt(tuple(next(encoded)), one) if isinstance(one, str) else Prompt(tuple(one)) for one in parts)
    if cut is not None:
        prompts = tuple(_cut(prompt, cut) for prompt in prompts)
    for prompt in prompts:
        check_length(len(prompt.token_ids), model, param)
    return prompts


def _cut(prompt: Prompt, cut: Cut) -> Prompt:
    token_ids = cut(prompt.token_ids)
    return prompt if len(token_ids) == len(prompt.token_ids) else Prompt(token_ids)


def check_chars(text: str, model: ServedModel, param: str) -> None:
    """Refuses text that cannot fit however it is split, before a tokenizer spends seconds on it."""
    max_chars = model.max_model_len * getattr(model.tokenizer, "max_token_chars", FALLBACK_TOKEN_CHARS)
    if len(text) > max_chars:
        raise RequestError(
            f"{param}: {len(text)} characters cannot fit; prompt and output together are limited to "
            f"{model.max_model_len} tokens here", param, "context_length_exceeded")


def check_length(num_tokens: int, model: ServedModel, param: str) -> None:
    if num_tokens == 0:
        raise RequestError(f"{param}: no tokens in it; send at least one", param)
    if num_tokens >= model.max_model_len:
        raise PromptTooLong(num_tokens, model.max_model_len, param)
