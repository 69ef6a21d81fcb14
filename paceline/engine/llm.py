"""The engine as a library: prompts in, completions out, in the caller's own thread. Same core, same messages as the
server; only the loop around it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tqdm import tqdm

from ..clock import Clock
from ..errors import RequestError
from ..request import SamplingParams, StopMatch, check_sampling
from ..sched.choices import choice_id
from ..sched.limits import Limits, check_fits
from .async_engine import ServedModel
from .core import EngineCore
from .detokenizer import OutputText
from .messages import RequestOutput, Submit

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished choice. logprobs are raw (before temperature), one a token, when asked for."""

    prompt_index: int
    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
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

    def generate(self, prompts: Sequence[Prompt], *, n: int = 1, show_progress: bool = True,
                 **sampling: Any) -> list[Completion]:
        """Completes every prompt (text, or token ids) n times; results in order of prompt, then choice.

        Sampling parameters are the fields of SamplingParams, max_tokens 16 by default; a seed that is not given is
        drawn for each prompt and reported. Raises RequestError before anything runs.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts: give a list of prompts, not one string", param="prompts")
        if not 1 <= n <= 128:
            raise RequestError(f"n: {n} is not allowed; it lies between 1 and 128", param="n")
        submits = [self._submit(index, prompt, n, sampling) for index, prompt in enumerate(prompts)]
        return self._run(submits, show_progress)

    def chat(self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, n: int = 1, show_progress: bool = True,
             **sampling: Any) -> list[Completion]:
        """Answers every conversation, a list of {"role", "content"} messages, through the model's chat template."""
        if self.model.chat_template is None:
            raise RequestError("this model has no chat template; use generate", param="messages")
        texts = [self.model.chat_template.render(list(one), add_generation_prompt=True) for one in conversations]
        # A rendered template carries its own special tokens; the tokenizer must not add a second BOS.
        prompts = [self.model.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, n=n, show_progress=show_progress, **sampling)

    def _submit(self, index: int, prompt: Prompt, n: int, sampling: Mapping[str, Any]) -> Submit:
        if isinstance(prompt, str):
            token_ids = tuple(self.model.tokenizer.encode(prompt, add_special_tokens=True))
        else:
            token_ids = tuple(prompt)
        if not token_ids:
            raise RequestError(f"prompts[{index}]: no tokens to start from", param="prompts")
        if wrong := [token_id for token_id in token_ids if not 0 <= token_id < self.model.vocab_size]:
            raise RequestError(f"prompts[{index}]: token id {wrong[0]} is not in the vocabulary of "
                               f"{self.model.vocab_size}", param="prompts")
        params = self._params(len(token_ids), dict(sampling))
        request_id = f"llm-{self._num_calls}-{index}"
        return Submit(request_id=request_id, prompt_token_ids=token_ids, sampling=params, prompt_index=index,
                      arrival_time=self._clock.now(), num_choices=n)

    def _params(self, num_prompt_tokens: int, sampling: dict[str, Any]) -> SamplingParams:
        given = {name: value for name, value in sampling.items() if value is not None}
        given.setdefault("max_tokens", 16)
        given.setdefault("seed", self._draw_seed())
        for name in ("stop", "stop_token_ids"):
            if name in given:
                given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
        try:
            params = SamplingParams(**given)
        except TypeError as mistake:
            raise RequestError(f"sampling: {mistake}") from mistake
        check_sampling(params, self.model.vocab_size)
        max_tokens = check_fits(num_prompt_tokens, params.max_tokens, Limits(self.model.max_model_len))
        return replace(params, max_tokens=max_tokens)

    def _run(self, submits: Sequence[Submit], show_progress: bool) -> list[Completion]:
        self._num_calls += 1
        growing = {
            choice_id(submit.request_id, choice): _Growing(submit.prompt_index, choice, submit.sampling.seed)
            for submit in submits for choice in range(submit.num_choices)}
        texts = {submit.prompt_index: submit for submit in submits}
        done: list[Completion] = []
        with tqdm(total=len(growing), unit="completion", disable=not show_progress) as progress:
            for submit in submits:
                self.core.add(submit)
            while len(done) < len(growing):
                for output in self.core.step().outputs:
                    state = growing[output.request_id]
                    state.token_ids.extend(output.token_ids)
                    state.logprobs.extend(output.logprobs or ())
                    if output.finish_reason is not None:
                        done.append(self._completion(texts[state.prompt_index], state, output))
                        progress.update()
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.choice_index))

    def _completion(self, submit: Submit, state: _Growing, last: RequestOutput) -> Completion:
        assert last.finish_reason is not None and last.timeline is not None
        return Completion(
            prompt_index=state.prompt_index, choice_index=state.choice_index,
            text=self._text(submit, tuple(state.token_ids), last.stop),
            token_ids=tuple(state.token_ids),
            logprobs=tuple(state.logprobs) if submit.sampling.logprobs else None,
            finish_reason=last.finish_reason.value, seed=state.seed,
            num_prompt_tokens=len(submit.prompt_token_ids), num_cached_tokens=last.num_cached_tokens,
            num_preemptions=last.timeline.num_preemptions)

    def _text(self, submit: Submit, token_ids: tuple[int, ...], stop: StopMatch | None) -> str:
        text = OutputText(self.model.tokenizer, submit.sampling.stop)
        return text.push(token_ids) + text.finish(None if stop is None else stop.num_text_chars)

