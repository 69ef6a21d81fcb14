"""A request: what was asked, who asked, and how far it is. Pure data; policies and the scheduler move it on.

`num_computed_tokens` is the whole of a request's progress: scheduling means closing the gap to `num_tokens`. Chunked
prefill, prefix hits, recomputation after preemption and decoding are the same subtraction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

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
    TIMEOUT = "timeout"  # its deadline came first


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Validated at the door (server or LLM); inside the engine every value is legal.

    Every draw goes through these in this order; paceline/ops/numpy_sampler.py states each step exactly:
      allowed_token_ids, bans (min_tokens, bad_words), logit_bias, repetition_penalty, frequency_penalty,
      presence_penalty, temperature, min_p, top_k, top_p, typical_p.
    Greedy (temperature 0) takes the largest logit, of equals the lowest id, after all that stands before temperature.
    This is vLLM's order, with typical_p, which vLLM lacks, at the end as in transformers. transformers differs: it adds
    biases and penalties before its bans, and cuts min_p after top_p, so that top_p there sees more of the tail.
    Log-probabilities are those of the raw logits: nothing above enters them.
    """

    max_tokens: int                           # tokens to generate at most, >= 1
    min_tokens: int = 0                       # so many are generated before an end token or a stop string may end it
    temperature: float = 1.0                  # 0 = greedy
    top_k: int | None = None                  # None = whole vocabulary
    top_p: float = 1.0                        # in (0, 1]
    min_p: float = 0.0                        # least probability kept, as a share of the largest one; 0 = keep all
    typical_p: float = 1.0                    # share of probability kept, the most typical tokens first; 1 = keep all
    repetition_penalty: float = 1.0           # on tokens of prompt and output; above 1 discourages
    presence_penalty: float = 0.0             # off the logit of tokens that the output has
    frequency_penalty: float = 0.0            # the same, times how often it has them
    logit_bias: tuple[tuple[int, float], ...] = ()      # (token id, added to its logit); -100 bans in effect
    allowed_token_ids: tuple[int, ...] | None = None    # only these can be drawn; None = all
    bad_words: tuple[tuple[int, ...], ...] = ()         # token sequences that the output shall not complete
    seed: int = 0                             # 64-bit; a request without one gets it at the door, recorded here
    stop: tuple[str, ...] = ()                # stop strings, excluded from the text
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False  # the text keeps the stop string, or the stop token's text
    skip_special_tokens: bool = True          # special tokens give no text
    ignore_eos: bool = False                  # generate past the model's end-of-sequence tokens
    logprobs: int | None = None               # report each token's raw log-probability, and of so many best ones
    prompt_logprobs: int | None = None        # the same of the prompt's tokens, but the first, which has none

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it by more than the model's own eyes."""
        return (self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
                or bool(self.bad_words) or self.min_tokens > 0)

    @property
    def is_plain(self) -> bool:
        """Nothing is asked beyond temperature, top_k, top_p and the chosen token's own log-probability."""
        return (self.min_p == 0.0 and self.typical_p == 1.0 and not self.logit_bias and self.allowed_token_ids is None
                and not self.looks_back and not self.logprobs and self.prompt_logprobs is None)


MAX_STOP_STRINGS = 4
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024            # entries
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORD_TOKENS = 4096       # of all sequences together
SEED_RANGE = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from least to most, both legal; is_open: least itself is not. NaN is in no range."""

    least: float
    most: float
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        if self.is_open:
            return f"it lies above {self.least:g} and at most {self.most:g}"
        return f"it lies between {self.least:g} and {self.most:g}"


# The one place for what the numbers may be: the server, LLM and the command line read it.
RANGES: dict[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, is_open=True),
    "repetition_penalty": Range(0.01, 100),    # wider ones carry a logit out of what a float holds
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logit_bias": Range(-100, 100),
    "logprobs": Range(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS),
}


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuses values the engine has no meaning for, naming field, value and limit. Raises RequestError."""
    if params.max_tokens < 1:
        _refuse("max_tokens", params.max_tokens, "at least 1 is needed")
    if not 0 <= params.min_tokens <= params.max_tokens:
        _refuse("min_tokens", params.min_tokens, f"it lies between 0 and max_tokens, which is {params.max_tokens}")
    if params.top_k is not None and params.top_k < 1:
        _refuse("top_k", params.top_k, "at least 1 is needed; leave it out for the whole vocabulary")
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if name != "logit_bias" and value is not None and value not in allowed:
            _refuse(name, value, str(allowed))
    if not SEED_RANGE[0] <= params.seed <= SEED_RANGE[1]:
        _refuse("seed", params.seed, "it is a signed 64-bit number")
    if len(params.stop) > MAX_STOP_STRINGS:
        _refuse("stop", list(params.stop), f"at most {MAX_STOP_STRINGS} strings")
    if "" in params.stop:
        _refuse("stop", list(params.stop), "an empty string matches everywhere")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_masks(params, vocab_size)


def _refuse(field_name: str, value: object, limit: str) -> NoReturn:
    raise RequestError(f"{field_name}: {value!r} is not allowed; {limit}", param=field_name)


def _check_ids(field_name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            _refuse(field_name, token_id, f"token ids lie between 0 and {vocab_size - 1}")


def _check_masks(params: SamplingParams, vocab_size: int) -> None:
    """What rules tokens in and out. A demand that can never be met is refused; one that runs into a corner while it
    generates is not an error: see the bans in paceline/ops/numpy_sampler.py."""
    biased = [token_id for token_id, _ in params.logit_bias]
    _check_ids("logit_bias", biased, vocab_size)
    if len(biased) > MAX_LOGIT_BIAS:
        _refuse("logit_bias", f"{len(biased)} entries", f"at most {MAX_LOGIT_BIAS}")
    if len(set(biased)) < len(biased):
        _refuse("logit_bias", biased, "each token id once")
    for _, bias in params.logit_bias:
        if bias not in RANGES["logit_bias"]:
            _refuse("logit_bias", bias, str(RANGES["logit_bias"]))
    if not all(params.bad_words):
        _refuse("bad_words", "", "each word needs at least one token")
    if sum(map(len, params.bad_words)) > MAX_BAD_WORD_TOKENS:
        _refuse("bad_words", f"{sum(map(len, params.bad_words))} tokens", f"at most {MAX_BAD_WORD_TOKENS}")
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)
    if params.allowed_token_ids is None:
        return
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if not 1 <= len(params.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
        _refuse("allowed_token_ids", f"{len(params.allowed_token_ids)} ids", f"1 to {MAX_ALLOWED_TOKEN_IDS} are needed")
    if not {*params.allowed_token_ids} - {word[0] for word in params.bad_words if len(word) == 1}:
        _refuse("allowed_token_ids", list(params.allowed_token_ids)[:10], "bad_words must leave one of them")


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
    num_scored_tokens: int = 0               # of the prompt, whose log-probabilities were reported (prompt_logprobs)
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0           # computed more than once, because a preemption had lost them
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
