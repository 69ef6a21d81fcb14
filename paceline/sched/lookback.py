"""What a row of a request with more than plain sampling carries: its token history, and prompt tokens to score.

A prompt token is scored by the logits of the token before it, so position p scores token p + 1, and a request that
still has tokens to score cannot take their positions from the prefix cache: it takes no hit at all. `num_scored_tokens`
counts what was reported (the first token, which nothing predicts, included); a preempted request scores only the rest.
"""

from __future__ import annotations

from ..request import Request
from .outputs import RequestOutput, output_of
from .plan import RowResult, SamplingRef, ScheduledRequest, ScoredTokens, TokenHistory


def sampling_ref_of(request: Request, eos_token_ids: frozenset[int]) -> SamplingRef:
    params = request.sampling
    ends: set[int] = set()
    if params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    return SamplingRef(params, request.prompt_index, request.choice_index, tuple(sorted(ends)))


def has_unscored(request: Request) -> bool:
    """Whether prompt tokens are still to be scored. A fork does not score the prompt it shares: its parent has."""
    return (request.sampling.prompt_logprobs is not None and request.parent_id is None
            and max(request.num_scored_tokens, 1) < request.num_prompt_tokens)


def num_tokens_within(request: Request, num_tokens: int, num_scored_left: int) -> int:
    """Of the next num_tokens, so many that no more than num_scored_left prompt tokens are scored by them."""
    if not has_unscored(request):
        return num_tokens
    first = max(request.num_scored_tokens - 1, 0, request.num_computed_tokens)    # position that scores the next one
    if request.num_prompt_tokens - 1 - first <= num_scored_left:
        return num_tokens
    return min(num_tokens, first - request.num_computed_tokens + num_scored_left)


def scored_by(request: Request, num_new_tokens: int) -> ScoredTokens | None:
    """What the next num_new_tokens score."""
    if not has_unscored(request):
        return None
    start = request.num_computed_tokens
    first = max(request.num_scored_tokens - 1, 0, start)
    token_ids = request.prompt_token_ids[first + 1 : start + num_new_tokens + 1]
    return ScoredTokens(first - start, token_ids, request.sampling.prompt_logprobs or 0) if token_ids else None


def history_of(request: Request) -> TokenHistory | None:
    if not request.sampling.looks_back:
        return None
    return TokenHistory(request.prompt_token_ids, tuple(request.output_token_ids))


def news_of_scores(request: Request, row: ScheduledRequest, result: RowResult) -> list[RequestOutput]:
    """Commits that the row's prompt tokens have been scored, and what it brought in a row that draws nothing."""
    if row.scored is None:
        return []
    request.num_scored_tokens = max(request.num_scored_tokens, 1) + len(result.scored)
    return [output_of(request, result)]
