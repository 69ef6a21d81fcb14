"""One request under way: the client's side writes down here what comes, and it becomes a RequestRecord."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .records import Asked, RequestRecord

MAX_ERROR_CHARS = 300
BAD_ENDS = ("abort", "error", "timeout")    # finish reasons by which a server says that it did not go well


@dataclass(slots=True, kw_only=True)
class Call:
    """`clock` gives seconds since the start of the cell. A chunk whose count is None brought tokens, nobody said how
    many."""

    clock: Callable[[], float]
    intended_at: float = 0.0
    released_at: float | None = None
    sent_at: float | None = None
    ended_at: float | None = None
    status: str = "dropped"                # until the stream has ended as it should
    error: str | None = None
    http_status: int | None = None
    chunk_times: list[float] = field(default_factory=list)
    chunk_counts: list[int | None] = field(default_factory=list)
    counted_by: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    finish_reason: str | None = None

    def chunk(self, at: float, count: int | None, counted_by: str | None = None) -> None:
        self.chunk_times.append(at)
        self.chunk_counts.append(count)
        self.counted_by = counted_by or self.counted_by

    def usage(self, usage: Mapping[str, Any]) -> None:
        """As OpenAI's servers tell it; a chunk may bring what has come so far."""
        details = usage.get("prompt_tokens_details") or {}
        for name, value in (("prompt_tokens", usage.get("prompt_tokens")),
                            ("output_tokens", usage.get("completion_tokens")),
                            ("cached_tokens", details.get("cached_tokens"))):
            if value is not None:
                setattr(self, name, value)

    def fail(self, status: str, error: str) -> None:
        """The first failure counts."""
        if self.error is None:
            self.status, self.error = status, error[:MAX_ERROR_CHARS] or status

    def end(self, at: float) -> None:
        """The stream has ended as the protocol says."""
        self.ended_at = at
        if self.error is not None:
            return
        if self.finish_reason in BAD_ENDS:
            self.fail("dropped", f"the server ended it with {self.finish_reason!r}")
        elif not self.chunk_times:
            self.fail("dropped", "the answer ended without a token")
        else:
            self.status = "ok"

    def record(self, asked: Asked, cell: str, is_warm_up: bool) -> RequestRecord:
        if self.status == "dropped" and self.error is None:
            self.error = f"the stream broke off after {len(self.chunk_times)} chunks"
        counts, counted_by = self._counts()
        return RequestRecord(
            request_id=asked.request_id, cell=cell, status=self.status, error=self.error, http_status=self.http_status,
            is_warm_up=is_warm_up, intended_at=self.intended_at, released_at=self.released_at, sent_at=self.sent_at,
            token_times=tuple(self.chunk_times), token_counts=counts, ended_at=self.ended_at,
            asked_prompt_tokens=asked.num_prompt_tokens, asked_output_tokens=asked.num_output_tokens,
            prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, counted_by=counted_by,
            cached_tokens=self.cached_tokens, finish_reason=self.finish_reason, preemptions=self.preemptions,
            slo=asked.slo, tenant=asked.tenant)

    def _counts(self) -> tuple[tuple[int, ...], str | None]:
        """Tokens of each chunk. Where the chunks did not say, what the usage has beyond those that did is spread evenly
        over the rest: one each (`events`) is certain, else it is marked `spread`. Without a usage each chunk counts as
        one, which is a `guess`."""
        unknown = [place for place, count in enumerate(self.chunk_counts) if count is None]
        if not unknown:
            return tuple(count for count in self.chunk_counts if count is not None), self.counted_by
        counts = [count or 0 for count in self.chunk_counts]
        if self.output_tokens is None:
            for place in unknown:
                counts[place] = 1
            return tuple(counts), "guess"
        left = max(self.output_tokens - sum(counts), 0)
        for rank, place in enumerate(unknown):
            counts[place] = left * (rank + 1) // len(unknown) - left * rank // len(unknown)
        return tuple(counts), "events" if left == len(unknown) else "spread"
