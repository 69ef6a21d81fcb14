"""A request: what was asked, who asked, and how far it is. Pure data; policies and the scheduler move it on.

`num_computed_tokens` is the whole of a request's progress: scheduling means closing the gap to `num_tokens`. Chunked
prefill, prefix hits, recomputation after preemption and decoding are the same subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .errors import RequestError


class RequestStatus(Enum):
    WAITING = "waiting"        # accepted, holds no blocks
    RUNNING = "running"        # holds blocks
    PREEMPTED = "preempted"    # waits again; its blocks were taken, its tokens were kept
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"        # an end-of-sequence token, a stop token id or a stop string
    LENGTH = "length"    # max_tokens or the context limit
    ABORT = "abort"      # the client left or asked for it
    ERROR = "error"      # the step failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Validated at the door (server or LLM); inside the engine every value is legal.

    Order (documented, tested against a numpy reference): temperature, then top_k, then top_p over the scaled
    distribution; the draw walks the kept tokens in id order. temperature 0 is argmax, ties to the lowest id.
    """

    max_tokens: int                           # tokens to generate at most, >= 1
    temperature: float = 1.0                  # 0 = greedy
    top_k: int | None = None                  # None = whole vocabulary
    top_p: float = 1.0                        # in (0, 1]
    seed: int = 0                             # 64-bit; a request without one gets it at the door, recorded here
    stop: tuple[str, ...] = ()                # stop strings, excluded from the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False                  # generate past the model's end-of-sequence tokens
    logprobs: bool = False                    # report the chosen token's raw log-probability


MAX_STOP_STRINGS = 4
SEED_RANGE = (-(1 << 63), (1 << 63) - 1)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuses values the engine has no meaning for, naming field, value and limit. Raises RequestError."""

    def refuse(field_name: str, value: object, limit: str) -> None:
        raise RequestError(f"{field_name}: {value!r} is not allowed; {limit}", param=field_name)

    if params.max_tokens < 1:
        refuse("max_tokens", params.max_tokens, "at least 1 is needed")
    if not 0.0 <= params.temperature <= 2.0:    # `not` also refuses NaN
        refuse("temperature", params.temperature, "it lies between 0 and 2")
    if params.top_k is not None and params.top_k < 1:
        refuse("top_k", params.top_k, "at least 1 is needed; leave it out for the whole vocabulary")
    if not 0.0 < params.top_p <= 1.0:
        refuse("top_p", params.top_p, "it lies above 0 and at most 1")
    if not SEED_RANGE[0] <= params.seed <= SEED_RANGE[1]:
        refuse("seed", params.seed, "it is a signed 64-bit number")
    if len(params.stop) > MAX_STOP_STRINGS:
        refuse("stop", list(params.stop), f"at most {MAX_STOP_STRINGS} strings")
    if "" in params.stop:
        refuse("stop", list(params.stop), "an empty string matches everywhere")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            refuse("stop_token_ids", token_id, f"token ids lie between 0 and {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Why a STOP finish happened: the token id or the string, and for a string how much text remains."""

    token_id: int | None = None
    text: str | None = None
    num_text_chars: int | None = None    # characters of output text before the match; None: all of it


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One choice of one prompt. Identity is the object and its unique `request_id`."""

    request_id: str                          # unique in the engine's life; never reused
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float                      # seconds on the engine's clock
    tenant: str = "default"
    priority: int = 0                        # lower is served first
    deadline: float | None = None            # seconds on the engine's clock
    cache_extras: tuple[str, ...] = ()       # salt, adapter: enter the hash of every block
    parent_id: str | None = None             # the request this one was forked from
    prompt_index: int = 0                    # which prompt of the call; keys the randomness
    choice_index: int = 0                    # which choice of the prompt; keys the randomness
    num_choices: int = 1                     # > 1 on a parent: how many choices share its prompt
    program_id: str | None = None            # the multi-call program this call belongs to

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_tables: tuple[tuple[int, ...], ...] = ()    # one per KV group; the same object until a block comes or goes
    num_computed_tokens: int = 0             # tokens whose K/V is valid in this request's blocks
    num_cached_tokens: int = 0               # of the prompt, taken from the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop: StopMatch | None = None
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        # Spelled out: a step asks this several times of every running request.
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at positions [start, end) of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return tuple(self.output_token_ids[start - num_prompt : end - num_prompt])
        return self.prompt_token_ids[start:] + tuple(self.output_token_ids[: end - num_prompt])
