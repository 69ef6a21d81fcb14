"""The plan of one step and its result: frozen values that can be printed, written, diffed and replayed.

The plan holds everything an executor needs and nothing it can change. Whatever an executor keeps between steps can be
rebuilt from plans; dropping it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeAlias

from ..request import SamplingParams, StopMatch


class LastSampled(Enum):
    """Stands for the token that the step before this one samples for the same request: lets step N+1 be planned
    while N still runs."""

    TOKEN = "last_sampled"


InputToken: TypeAlias = int | LastSampled


class TransferKind(Enum):
    COPY = "copy"            # block to block, before any row of this step runs (copy-on-write of forks)
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block moved. Transfers of a step run in list order, all before its rows."""

    transfer_id: int
    kind: TransferKind
    kv_group: int
    source: int         # block id, or an address in the tier the kind names
    destination: int


@dataclass(frozen=True, slots=True)
class SamplingRef:
    """What a draw depends on. Randomness is a counter keyed by (seed, prompt_index, choice_index, position).

    end_token_ids: what ends the request, ruled out until min_tokens are out; empty without min_tokens.
    """

    params: SamplingParams
    prompt_index: int
    choice_index: int
    end_token_ids: tuple[int, ...] = ()
    is_plain: bool = field(init=False, compare=False)      # SamplingParams.is_plain, asked once: rows are many
    looks_back: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.params.is_plain)
        object.__setattr__(self, "looks_back", self.params.looks_back)


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """A request's tokens as far as they are known, for draws that look back (penalties, bad_words, min_tokens).

    A draw at position p sees those below p: of these the ones below the row's num_computed_tokens, then the row's own.
    """

    prompt_token_ids: tuple[int, ...]    # the same object in every step of a request
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens whose log-probability is wanted: token i follows the row's token at first_offset + i."""

    first_offset: int
    token_ids: tuple[int, ...]
    num_top: int                         # best tokens wanted beside each


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]    # (token id, raw log-probability), best first


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One row of a step: tokens of one request to run through the model.

    token_ids[0] sits at position num_computed_tokens. block_ids, one tuple per KV group, covers at least positions
    [0, num_computed_tokens + len(token_ids)), with NULL_BLOCK for blocks behind the group's window; it is the same
    tuple object until a block comes or goes.
    logits_offsets are offsets into token_ids whose next-token logits are wanted; empty with sampling None for a prompt
    chunk that ends before the last known token. With sampling set, one token is drawn per logits offset. scored are
    tokens of the prompt to be scored, all before the first logits offset. history comes where sampling looks back.
    """

    request_id: str
    num_computed_tokens: int
    token_ids: tuple[InputToken, ...]
    block_ids: tuple[tuple[int, ...], ...]
    logits_offsets: tuple[int, ...]
    sampling: SamplingRef | None
    history: TokenHistory | None = None
    scored: ScoredTokens | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_scored(self) -> int:
        return 0 if self.scored is None else len(self.scored.token_ids)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the head of the queue did not start. Scarcity, not an error: the request waits."""

    request_id: str
    limit: str          # the knob or resource that said no, e.g. "num_kv_blocks", "max_num_seqs"
    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A victim of this step and what it lost."""

    request_id: str
    num_lost_tokens: int    # K/V that must be computed again unless the prefix cache still has it
    num_freed_blocks: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. `padding` rows run after `rows` and cost what rows cost, but nobody waits for what they
    give: they appear in no result. Slots are max_num_seqs; one without a row of `rows` is idle."""

    step_id: int
    rows: tuple[ScheduledRequest, ...]
    transfers: tuple[Transfer, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    refusal: Refusal | None = None
    num_waiting: int = 0
    num_running: int = 0
    num_started: int = 0    # requests that left the queue in this step
    padding: tuple[ScheduledRequest, ...] = ()
    num_idle_slots: int = 0

    @property
    def all_rows(self) -> tuple[ScheduledRequest, ...]:
        """What an executor runs, in order."""
        return self.rows + self.padding if self.padding else self.rows

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.all_rows)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the prompt with its raw log-probability, given the tokens before it."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row produced: 0..k tokens in order, with their raw log-probabilities where asked for.

    A row that failed produced nothing, and its K/V is not to be trusted; the other rows of the step are not touched.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    stop: StopMatch | None = None    # a stop string ended inside token_ids; tokens after the last are void
    top_logprobs: tuple[TopLogprobs, ...] | None = None    # of each position, where asked for
    scored: tuple[ScoredToken, ...] = ()                   # of the row's scored tokens, all of them
    failure: str | None = None       # why no usable token came: its request ends with ERROR

    def first(self, num_tokens: int) -> RowResult:
        """The same without the tokens after so many."""
        if num_tokens >= len(self.token_ids):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:num_tokens]
        top_logprobs = None if self.top_logprobs is None else self.top_logprobs[:num_tokens]
        return replace(self, token_ids=self.token_ids[:num_tokens], logprobs=logprobs, top_logprobs=top_logprobs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rows in the plan's order, and every measured quantity of the step."""

    step_id: int
    rows: tuple[RowResult, ...]
    duration_seconds: float = 0.0
    transfers_done: tuple[int, ...] = ()    # transfer ids that completed, of this step or earlier ones


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the scheduler may know of KV memory. What is inside a block is the executor's own business."""

    num_blocks: int
    block_size: int            # tokens
    bytes_per_block: int
    num_groups: int = 1
    layout_version: str = ""


class Ticket(Protocol):
    """A submitted step; opaque to everyone but the executor that issued it."""


class Executor(Protocol):
    """Runs plans. submit starts a step, collect waits for its result; tickets are collected in order."""

    def submit(self, plan: SchedulerOutput) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def kv_layout(self) -> KVLayout: ...
