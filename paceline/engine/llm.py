"""The engine as a library: prompts in, completions out, in the caller's own thread. Same core, same messages as the
server; only the loop around it differs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import index
from typing import Any

from tqdm import tqdm

from ..clock import Clock
from ..errors import RequestError
from ..request import SamplingParams, check_sampling
from ..sched.choices import choice_id
from ..sched.limits import Limits, check_fits
from ..sched.plan import ScoredToken, TopLogprobs
from .async_engine import ServedModel
from .core import EngineCore
from .detokenizer import OutputText
from .messages import RequestOutput, Submit
from .sampling import MAX_CHOICES, best_choices, check_best_of, params_from, truncated

Prompt = str | Sequence[int]
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished choice. Log-probabilities are raw (before temperature and whatever else changes logits), when asked
    for: logprobs one a token, top_logprobs the best (token id, log-probability) at each, prompt_logprobs those of the
    prompt's tokens but the first."""

    prompt_index: int
    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[TopLogprobs, ...] | None
    prompt_logprobs: tuple[ScoredToken, ...] | None
    finish_reason: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Growing:
    prompt_index: int
    choice_index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)    # the same list for all choices of a prompt

    def take(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.top_logprobs += output.top_logprobs or ()
        self.prompt_logprobs.extend(output.prompt_logprobs)    # only choice 0 brings them


class LLM:
    """Made by build.build_llm or `paceline.LLM(model, **knobs)`. Use as a context manager, or call close()."""

    def __init__(self, core: EngineCore, model: ServedModel, clock: Clock, draw_seed: Callable[[], int],
                 close: Callable[[], None]) -> None:
        self.core = core
        self.model = model
        self._clock = clock
        self._draw_seed = draw_seed
        self._close = close
        self._num_calls = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives memory and threads back. The LLM is of no use afterwards."""
        self._close()

    def generate(self, prompts: Sequence[Prompt], *, n: int = 1, priorities: Sequence[int] | None = None,
                 show_progress: bool = True, **sampling: Any) -> list[Completion]:
        """Completes every prompt (text, or token ids) n times; results in order of prompt, then choice.

        Sampling parameters are the fields of SamplingParams, max_tokens 16 by default; a seed that is not given is
        drawn for each prompt and reported. logit_bias may be a mapping, bad_words text. best_of generates so many
        choices and gives back the n with the highest log-probability per token, best first; truncate_prompt_tokens
        keeps the last so many tokens of a prompt, -1 as many as leave room for max_tokens. priorities, one a prompt,
        the lowest first, need an ordering or a victim rule that reads them. Raises RequestError before anything runs.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts: give a list of prompts, not one string", param="prompts")
        if not 1 <= n <= MAX_CHOICES:
            raise RequestError(f"n: {n} is not allowed; it lies between 1 and {MAX_CHOICES}", param="n")
        num_generated = check_best_of(sampling.pop("best_of", None), n)
        asked = dict(sampling)
        if num_generated > n and asked.get("logprobs") is None:
            asked["logprobs"] = 0
        submits = [self._submit(place, prompt, num_generated, asked) for place, prompt in enumerate(prompts)]
        if priorities is not None:
            submits = self._with_priorities(submits, priorities)
        done = self._run(submits, show_progress)
        return done if num_generated == n else _best(done, n, sampling.get("logprobs") is not None)

    def chat(self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, n: int = 1, show_progress: bool = True,
             continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
             **sampling: Any) -> list[Completion]:
        """Answers every conversation, a list of {"role", "content"} messages, through the chat template.

        continue_final_message goes on with the text of the last message instead of opening a turn;
        chat_template_kwargs are further variables for the template.
        """
        template = self.model.chat_template
        if template is None:
            raise RequestError("this model has no chat template; use generate", param="messages")
        texts = [template.render(list(one), not continue_final_message, None, chat_template_kwargs,
                                 continue_final_message) for one in conversations]
        # A rendered template carries its own special tokens; the tokenizer must not add a second BOS.
        prompts = [self.model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, n=n, show_progress=show_progress, **sampling)

    def _with_priorities(self, submits: Sequence[Submit], priorities: Sequence[int]) -> list[Submit]:
        if not self.model.reads_priority:
            raise RequestError("priorities: this engine does not look at them; make it with ordering='priority'",
                               param="priorities")
        if len(priorities) != len(submits):
            raise RequestError(f"priorities: {len(priorities)} for {len(submits)} prompts", param="priorities")
        return [replace(submit, priority=one) for submit, one in zip(submits, priorities, strict=True)]

    def _submit(self, place: int, prompt: Prompt, n: int, sampling: Mapping[str, Any]) -> Submit:
        name = f"prompts[{place}]"
        token_ids = self._token_ids(name, prompt)
        asked = dict(sampling)
        num_kept = asked.pop("truncate_prompt_tokens", None)
        params = self._params(asked)
        token_ids = truncated(token_ids, num_kept, self.model.max_model_len, params.max_tokens)
        if not token_ids:
            raise RequestError(f"{name}: no tokens to start from", param="prompts")
        if wrong := [token_id for token_id in token_ids if not 0 <= token_id < self.model.vocab_size]:
            raise RequestError(f"{name}: token id {wrong[0]} is not in the vocabulary of "
                               f"{self.model.vocab_size}", param="prompts")
        max_tokens = check_fits(len(token_ids), params.max_tokens, Limits(self.model.max_model_len))
        params = replace(params, max_tokens=max_tokens)
        request_id = f"llm-{self._num_calls}-{place}"
        return Submit(request_id=request_id, prompt_token_ids=token_ids, sampling=params,
                      prompt_index=place, arrival_time=self._clock.now(), num_choices=n)

    def _token_ids(self, name: str, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.model.tokenizer.encode(prompt, add_special_tokens=True))
        try:
            return tuple(map(index, prompt))
        except TypeError as mistake:
            raise RequestError(f"{name}: {prompt!r:.100} is of the wrong kind: {mistake}", param=name) from mistake

    def _params(self, sampling: dict[str, Any]) -> SamplingParams:
        given = {"max_tokens": DEFAULT_MAX_TOKENS, "seed": self._draw_seed()}
        given |= {name: value for name, value in sampling.items() if value is not None}
        params = params_from(given, self.model.tokenizer)
        check_sampling(params, self.model.vocab_size)
        return params

    def _run(self, submits: Sequence[Submit], show_progress: bool) -> list[Completion]:
        self._num_calls += 1
        growing = {request_id: state for submit in submits for request_id, state in _growing_of(submit)}
        texts = {submit.prompt_index: submit for submit in submits}
        done: list[Completion] = []
        try:
            with (tqdm(total=len(growing), unit="completion", disable=not show_progress) as progress,
                  interrupts_between_steps() as interrupt_if_asked):
                for submit in submits:
                    self.core.add(submit)
                while len(done) < len(growing):
                    interrupt_if_asked()
                    time.sleep(self.core.seconds_until_work() or 0.0)    # a regime may wait for a fuller batch
                    for output in self.core.step().outputs:
                        state = growing[output.request_id]
                        state.take(output)
                        if output.finish_reason is not None:
                            done.append(self._completion(texts[state.prompt_index], state, output))
                            progress.update()
        except BaseException:
            self._give_up(submits)
            raise
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.choice_index))

    def _give_up(self, submits: Sequence[Submit]) -> None:
        """What an interrupted call leaves behind would take blocks from the next one and mix with its results."""
        self.core.abort([submit.request_id for submit in submits])
        if not self.core.scheduler.has_work():
            self.core.step()    # its news are nobody's

    def _completion(self, submit: Submit, state: _Growing, last: RequestOutput) -> Completion:
        assert last.finish_reason is not None and last.timeline is not None
        asked, token_ids = submit.sampling, tuple(state.token_ids)
        return Completion(
            prompt_index=state.prompt_index, choice_index=state.choice_index,
            text=OutputText.of(self.model.tokenizer, asked).end(token_ids, last.stop),
            token_ids=token_ids,
            logprobs=tuple(state.logprobs) if asked.logprobs is not None else None,
            top_logprobs=tuple(state.top_logprobs) if asked.logprobs else None,
            prompt_logprobs=None if asked.prompt_logprobs is None else tuple(state.prompt_logprobs),
            finish_reason=last.finish_reason.value, seed=state.seed,
            num_prompt_tokens=len(submit.prompt_token_ids), num_cached_tokens=last.num_cached_tokens,
            num_preemptions=last.timeline.num_preemptions)


def _growing_of(submit: Submit) -> list[tuple[str, _Growing]]:
    scores: list[ScoredToken] = []
    return [(choice_id(submit.request_id, choice),
             _Growing(submit.prompt_index, choice, submit.sampling.seed, prompt_logprobs=scores))
            for choice in range(submit.num_choices)]


def _best(done: Sequence[Completion], n: int, keeps_logprobs: bool) -> list[Completion]:
    """Of each prompt's choices the n best, as choices 0 to n - 1."""
    picked: list[Completion] = []
    for _, group in groupby(done, key=lambda one: one.prompt_index):
        choices = list(group)
        best = best_choices([one.logprobs or () for one in choices], n)
        for place, choice in enumerate(best):
            logprobs = choices[choice].logprobs if keeps_logprobs else None
            picked.append(replace(choices[choice], choice_index=place, logprobs=logprobs))
    return picked


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect where the function given here is called: half a step would leave the engine unusable. The
    second Ctrl-C does not wait."""
    asked: list[int] = []

    def on_interrupt(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            signal.default_int_handler(number, frame)

    def interrupt_if_asked() -> None:
        if asked:
            raise KeyboardInterrupt

    is_ours = (threading.current_thread() is threading.main_thread()
               and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    if is_ours:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupt_if_asked
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
