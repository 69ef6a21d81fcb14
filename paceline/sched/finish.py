"""When a request is done. STOP outranks LENGTH: a model that ended by itself on its last allowed token did stop."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvariantError
from ..request import FinishReason, Request, StopMatch
from .plan import RowResult


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop: StopMatch | None = None


LENGTH = Finish(FinishReason.LENGTH)
ABORTED = Finish(FinishReason.ABORT)
FAILED = Finish(FinishReason.ERROR)
EXPIRED = Finish(FinishReason.TIMEOUT)


@dataclass(frozen=True, slots=True)
class FinishRules:
    """What ends any request of this engine, beside its own sampling parameters."""

    eos_token_ids: frozenset[int]
    max_model_len: int


def append_tokens(request: Request, result: RowResult, rules: FinishRules) -> tuple[int, Finish | None]:
    """Appends a row's tokens up to the one that ends the request. Returns how many were taken, and the end if any."""
    if not result.token_ids and result.stop is None:
        raise InvariantError(f"{request.request_id} was to be sampled but got no token")
    for num_taken, token_id in enumerate(result.token_ids, start=1):
        request.output_token_ids.append(token_id)
        finish = finish_after(request, token_id, rules)
        is_stopped_by_text = result.stop is not None and num_taken == len(result.token_ids)
        if finish is not None and not is_stopped_by_text:
            return num_taken, finish
    if result.stop is not None:
        return len(result.token_ids), Finish(FinishReason.STOP, result.stop)
    return len(result.token_ids), None


def finish_after(request: Request, token_id: int, rules: FinishRules) -> Finish | None:
    """Whether the token just appended is the last one."""
    sampling, num_output_tokens = request.sampling, len(request.output_token_ids)
    is_long_enough = num_output_tokens > sampling.min_tokens    # an end is the token after min_tokens
    if is_long_enough and (token_id in sampling.stop_token_ids or (
        token_id in rules.eos_token_ids and not sampling.ignore_eos
    )):
        return Finish(FinishReason.STOP, StopMatch(token_id=token_id))
    num_tokens = len(request.prompt_token_ids) + num_output_tokens
    if num_output_tokens >= sampling.max_tokens or num_tokens >= rules.max_model_len:
        return LENGTH
    return None
