"""What can ever be served, asked before anything is queued. Pure functions over one small value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PromptTooLong, RequestError
from ..request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len` is the effective one: the model's limit, or less where the whole KV pool holds less."""

    max_model_len: int    # tokens of prompt and output together


def check_fits(num_prompt_tokens: int, max_tokens: int | None, limits: Limits, is_strict: bool = False) -> int:
    """The max_tokens to run with: lowered to what the context leaves, or refused there when `is_strict`.

    None asks for the rest of the context. Raises PromptTooLong where not even one token can be generated.
    """
    if num_prompt_tokens < 1:
        raise RequestError("prompt: at least one token is needed", param="prompt")
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens: must be at least 1, got {max_tokens}", param="max_tokens")
    num_left = limits.max_model_len - num_prompt_tokens
    if num_left < 1:
        raise PromptTooLong(num_prompt_tokens, limits.max_model_len)
    if max_tokens is None:
        return num_left
    if is_strict and max_tokens > num_left:
        raise RequestError(
            f"max_tokens: {max_tokens} asked, but a prompt of {num_prompt_tokens} tokens leaves {num_left} "
            f"of {limits.max_model_len}",
            param="max_tokens",
        )
    return min(max_tokens, num_left)


def parent_of_fork(requests: Mapping[str, Request], parent_id: str, child: Request) -> Request:
    """The running request that the child may be forked from. Raises RequestError where there is none."""
    parent = requests.get(parent_id)
    if parent is None or parent.status is not RequestStatus.RUNNING:
        raise RequestError(f"{parent_id} is not running, it cannot be forked", param="request_id")
    num_shared = parent.num_computed_tokens
    if child.num_tokens <= num_shared or child.token_ids(0, num_shared) != parent.token_ids(0, num_shared):
        raise RequestError("a fork must begin with the tokens its parent has computed", param="prompt")
    return parent
