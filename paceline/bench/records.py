"""What a load asks and what came of it: the two lists from which every figure of the lab is computed.

A request file is JSON lines of Asked, the same for each target; a result file is JSON lines of RequestRecord. All times
are seconds on one monotonic clock that starts with the cell, so any definition can be computed again later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of a workload. Exactly one of prompt_token_ids, prompt and messages is set."""

    request_id: str
    num_output_tokens: int                           # asked for as both least and most
    num_prompt_tokens: int | None = None             # as the workload counts; None: known to the server only
    prompt_token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    arrival_seconds: float | None = None             # from the cell's start; None: the arrival process decides
    after: tuple[str, ...] = ()                      # requests that must have ended before (turns, agents)
    think_seconds: float = 0.0                       # between the last of these and this one
    tenant: str | None = None
    slo: str | None = None                           # class of service, named in --slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What one request met. `status` is "ok" only where the stream ended as the protocol says, with all its tokens."""

    request_id: str
    cell: str
    status: str                                # ok | refused | http_error | dropped | timeout | unreachable | cut
    error: str | None = None                   # the server's words, or the client's
    http_status: int | None = None
    is_warm_up: bool = False
    intended_at: float                         # when the load wanted it sent: queue of the client included from here on
    released_at: float | None = None           # when the cap on concurrency let it go; the client's own delay follows
    sent_at: float | None = None
    token_times: tuple[float, ...] = ()        # of each chunk that brought tokens
    token_counts: tuple[int, ...] = ()         # tokens in each of these chunks
    ended_at: float | None = None
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int
    prompt_tokens: int | None = None           # as the server counted
    output_tokens: int | None = None
    counted_by: str | None = None              # whence token_counts: token_ids | usage | events | spread | guess
    cached_tokens: int | None = None
    finish_reason: str | None = None
    preemptions: int | None = None             # where the server tells
    slo: str | None = None
    tenant: str | None = None
