"""What both doors (the server and LLM) do about sampling before and after the engine: values as a caller brings them
made plain, words made tokens, prompts cut, the best of several choices picked. Ranges: request.check_sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any

from ..errors import RequestError
from ..model.tokenizer import Tokenizer
from ..request import SamplingParams

MAX_CHOICES = 128    # n and best_of


def params_from(given: Mapping[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """SamplingParams from fields as a Python caller may write them: numpy's numbers, lists, one stop string, bad_words
    as text or token ids, logit_bias as a mapping, logprobs=True. None means absent. Raises RequestError."""
    plain = {name: _plain(name, KINDS[name], value) if name in KINDS else value
             for name, value in given.items() if value is not None and name != "bad_words"}
    if (words := given.get("bad_words")) is not None:
        plain["bad_words"] = bad_word_tokens(words, tokenizer)
    try:
        return SamplingParams(**plain)
    except TypeError as mistake:
        raise RequestError(f"sampling: {mistake}") from mistake


def bad_word_tokens(words: Any, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words: of text its tokens as it stands, without spaces before it and with one, since a
    tokenizer spells these differently. Only these spellings are banned: other tokens may still give the same text."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in [words] if isinstance(words, str) else _plain("bad_words", tuple, words):
        if not isinstance(word, str):
            sequences[_plain("bad_words", _ids, word)] = None
            continue
        forms = (word, word.lstrip(), f" {word.lstrip()}")
        spelt = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
        if not word.strip() or not all(spelt):
            raise RequestError(f"bad_words: {word!r:.100} gives no tokens that could be banned", param="bad_words")
        sequences.update(dict.fromkeys(map(tuple, spelt)))
    return tuple(sequences)


def truncated(token_ids: tuple[int, ...], num_kept: Any, max_model_len: int, max_tokens: int) -> tuple[int, ...]:
    """The last num_kept tokens of a prompt; -1: as many as leave room for max_tokens; None: all. RequestError."""
    if num_kept is None:
        return token_ids
    num_kept = _plain("truncate_prompt_tokens", index, num_kept)
    if num_kept == -1:
        return token_ids[-max(max_model_len - max_tokens, 1):]
    if not 1 <= num_kept < max_model_len:
        raise RequestError(f"truncate_prompt_tokens: {num_kept} is not allowed; it lies between 1 and "
                           f"{max_model_len - 1} here, or is -1 for as many as fit", param="truncate_prompt_tokens")
    return token_ids[-num_kept:]


def check_best_of(best_of: Any, n: int) -> int:
    """How many choices to generate; None: n. Raises RequestError."""
    best_of = n if best_of is None else _plain("best_of", index, best_of)
    if not n <= best_of <= MAX_CHOICES:
        limit = f"at least n ({n})" if best_of < n else f"at most {MAX_CHOICES}"
        raise RequestError(f"best_of: must be {limit}, got {best_of}", param="best_of")
    return int(best_of)


def best_choices(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """The n choices with the highest log-probability per token, best first; of equals the first one."""
    means = [sum(one) / len(one) if one else 0.0 for one in logprobs]
    return sorted(range(len(means)), key=lambda choice: -means[choice])[:n]


def _plain(name: str, kind: Callable[[Any], Any], value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as mistake:
        raise RequestError(f"{name}: {value!r:.100} is of the wrong kind: {mistake}", param=name) from mistake


def _ids(value: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(index, value))


def _texts(value: Iterable[Any]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(one, str) for one in texts):
        raise TypeError("each must be a string")
    return texts


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((int(token_id) if isinstance(token_id, str) else index(token_id), float(bias))
                 for token_id, bias in pairs)


def _count(value: Any) -> int | None:
    """How many best tokens: True is none beside the token itself, False is not to report any."""
    if isinstance(value, bool):
        return 0 if value else None
    return index(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it must be True or False")
    return value


KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed"), index),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"), float),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _count),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), _flag),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _ids),
    "stop": _texts,
    "logit_bias": _biases,
}
