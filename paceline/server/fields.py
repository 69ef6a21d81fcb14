"""Every request field once: type, range, default. Errors name the field, the limit and the value.

Three kinds of fields. Served ones are read by the tables below. Known ones that are not served are accepted only with a
value that asks for nothing (`NEUTRAL`) and refused by name otherwise. Unknown ones are reported, and ignored unless the
server is strict. null always means absent. true and false are not numbers; 16.0 is an integer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..engine.sampling import MAX_CHOICES
from ..errors import RequestError, Unsupported
from ..request import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, RANGES
from .replies import shown

INT64 = 1 << 63
MAX_EXACT_FLOAT = 1 << 53       # beyond it a float no longer says which integer was meant
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class Field:
    """One value: `kind` is integer, number, boolean or string; limits are inclusive (characters for a string), but for
    the least where is_open. `note` is for docs/api.md."""

    kind: str
    default: Any = None
    least: float | None = None
    most: float | None = None
    note: str = ""
    is_open: bool = False

    def read(self, name: str, value: Any) -> Any:
        if value is None:
            return self.default
        value = KINDS[self.kind](name, value)
        measure = len(value) if self.kind == "string" else value
        if self.is_open and measure == self.least:
            raise _out_of_range(name, f"above {self.least:g}", self.kind, value)
        if self.least is not None and not measure >= self.least:
            raise _out_of_range(name, f"at least {self.least}", self.kind, value)
        if self.most is not None and not measure <= self.most:
            raise _out_of_range(name, f"at most {self.most}", self.kind, value)
        return value


def _out_of_range(name: str, limit: str, kind: str, value: Any) -> RequestError:
    if kind == "string":
        return RequestError(f"{name}: must have {limit} characters, got {len(value)}", name)
    return RequestError(f"{name}: must be {limit}, got {shown(value)}", name)


def _wrong_type(name: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"{name}: must be {wanted}, got {shown(value)}", name)


def integer(name: str, value: Any) -> int:
    if isinstance(value, float) and abs(value) < MAX_EXACT_FLOAT and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, "an integer", value)
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(name, "a number", value)
    return float(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, "true or false", value)
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong_type(name, "a string", value)
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(name, "an object", value)
    return value


KINDS = {"integer": integer, "number": number, "boolean": boolean, "string": string, "object": json_object}


def ranged(name: str, default: float, note: str) -> Field:
    """A number whose range the engine's own table tells."""
    limits = RANGES[name]
    return Field("number", default, limits.least, limits.most, note, limits.is_open)


COMMON: dict[str, Field] = {
    "model": Field("string", None, 1, 1024, "a served name; the first one if left out"),
    "stream": Field("boolean", False, note="server-sent events"),
    "max_tokens": Field("integer", None, 0, note="16 if left out, in a chat the context's rest; 0 only with echo"),
    "max_completion_tokens": Field("integer", None, 0, note="wins over max_tokens"),
    "min_tokens": Field("integer", 0, 0, note="at most max_tokens; ends and stop strings do not count before"),
    "n": Field("integer", 1, 1, MAX_CHOICES, "choices"),
    "best_of": Field("integer", None, 1, MAX_CHOICES, "generate so many, answer with the n likeliest; no stream"),
    "temperature": ranged("temperature", 1.0, "0: greedy"),
    "top_p": Field("number", 1.0, 0, 1, "0: only the likeliest token"),
    "top_k": Field("integer", None, -1, INT64 - 1, "-1 and 0: the whole vocabulary"),
    "min_p": ranged("min_p", 0.0, "least probability kept, as a share of the largest one"),
    "typical_p": ranged("typical_p", 1.0, "locally typical sampling"),
    "repetition_penalty": ranged("repetition_penalty", 1.0, "on tokens of prompt and output"),
    "presence_penalty": ranged("presence_penalty", 0.0, "on tokens of the output"),
    "frequency_penalty": ranged("frequency_penalty", 0.0, "on tokens of the output, times their count"),
    "seed": Field("integer", None, -INT64, INT64 - 1, "a fresh one if left out"),
    "ignore_eos": Field("boolean", False, note="generate past the model's end tokens"),
    "skip_special_tokens": Field("boolean", True, note="special tokens give no text"),
    "include_stop_str_in_output": Field("boolean", False, note="the text keeps what stopped it"),
    "truncate_prompt_tokens": Field("integer", None, -1, None, "keep the prompt's last so many; -1: all that fit"),
    "user": Field("string", None, 0, 1024, "becomes the tenant"),
    "priority": Field("integer", 0, -(1 << 31), (1 << 31) - 1, "lower is served first, where the server looks at it"),
    "cache_salt": Field("string", None, 1, 1024, "shares cached prompts only with requests of the same salt"),
    "timeout": Field("number", None, 0.001, 86400, "seconds from arrival to the latest end; none if left out"),
    "return_token_ids": Field("boolean", False, note="the ids of prompt and output beside the text"),
}
COMPLETION: dict[str, Field] = COMMON | {
    "echo": Field("boolean", False, note="the text starts with the prompt"),
    "logprobs": Field("integer", None, 0, MAX_TOP_LOGPROBS, "best tokens beside each; with echo, the prompt's too"),
    "add_special_tokens": Field("boolean", True, note="the tokenizer adds a BOS where the model wants one"),
}
CHAT: dict[str, Field] = COMMON | {
    "logprobs": Field("boolean", False, note="each token's log-probability"),
    "top_logprobs": Field("integer", None, 0, MAX_TOP_LOGPROBS, "best tokens beside each; needs logprobs"),
    "add_generation_prompt": Field("boolean", None, note="open the assistant's turn"),
    "continue_final_message": Field("boolean", None, note="go on with the last message"),
    "add_special_tokens": Field("boolean", False, note="a template brings its own"),
    "chat_template": Field("string", None, 1, 1 << 20, "only with --trust-request-chat-template"),
    "chat_template_kwargs": Field("object", None, note="further variables for the template"),
}
# Served too, read by functions of their own: name -> what it is.
SHAPED = {
    "stop": f"a string, or up to {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_CHARS} characters",
    "stop_token_ids": f"up to {MAX_STOP_TOKEN_IDS} token ids",
    "logit_bias": f"an object of up to {MAX_LOGIT_BIAS}: token id to a number from -100 (bans in effect) to 100",
    "bad_words": f"up to {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_CHARS} characters, banned as their tokens, "
                 "with and without a space before",
    "allowed_token_ids": f"1 to {MAX_ALLOWED_TOKEN_IDS} token ids: no other can be drawn",
    "stream_options": "an object; include_usage adds a chunk with the usage; only with stream",
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
COMPLETION_SHAPED = {"prompt": "a string, token ids, or a list of these", **SHAPED}
CHAT_SHAPED = {"messages": "a list of objects with role and content", **SHAPED}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": ("",),
    "regex": (),
    "ebnf": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "kv_transfer_params": (),
    "token_ids_logprob": (),
    "n_probs": (0,),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "logits_processors": ([],),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "tfs_z": (1,),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {"suffix": ("",), "top_logprobs": (0,)}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "documents": ([],),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}


def read_fields(body: Mapping[str, Any], table: Mapping[str, Field]) -> dict[str, Any]:
    """All fields of the table, checked, absent ones by their default."""
    return {name: field.read(name, _asked(name, body, field)) for name, field in table.items()}


def _asked(name: str, body: Mapping[str, Any], field: Field) -> Any:
    value = body.get(name)    # of a completion, logprobs: false asks for nothing, as it does in a chat
    return None if value is False and name == "logprobs" and field.kind == "integer" else value


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises Unsupported for the first known field that asks for something we do not do."""
    for name, value in body.items():
        if value is None or name not in neutral or any(_is_same(value, accepted) for accepted in neutral[name]):
            continue
        accepted = " or ".join(["null", *(orjson.dumps(one).decode() for one in neutral[name])])
        raise Unsupported(f"{name}: not supported; only {accepted} is accepted, got {shown(value)}", name)


def _is_same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def unknown_fields(body: Mapping[str, Any], known: Collection[str], is_strict: bool) -> tuple[str, ...]:
    """Names that mean nothing here. A strict server refuses them."""
    options = body.get("stream_options") or {}
    unknown = tuple(name for name in body if name not in known)
    unknown += tuple(f"stream_options.{name}" for name in options if name not in STREAM_OPTIONS)
    if unknown and is_strict:
        raise RequestError(f"{shown(unknown[0])}: unknown field, and this server refuses those", unknown[0][:64])
    return unknown


def read_stop(value: Any) -> tuple[str, ...]:
    """A string or up to four; an empty one would match everywhere."""
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise _wrong_type("stop", "a string or a list of strings", value)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(strings)}", "stop")
    for one in strings:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise RequestError(f"stop: each string must have 1 to {MAX_STOP_CHARS} characters, got {len(one)}", "stop")
    return tuple(strings)


def read_stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong_type("stop_token_ids", "a list of token ids", value)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}", "stop_token_ids")
    check_token_ids("stop_token_ids", value, vocab_size)
    return tuple(value)


def read_allowed_token_ids(value: Any, vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _wrong_type("allowed_token_ids", "a list of token ids", value)
    if not 1 <= len(value) <= MAX_ALLOWED_TOKEN_IDS:
        message = f"allowed_token_ids: must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids, got {len(value)}"
        raise RequestError(message, "allowed_token_ids")
    check_token_ids("allowed_token_ids", value, vocab_size)
    return tuple(dict.fromkeys(value))


def read_logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys are token ids as JSON spells them there: strings."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _wrong_type("logit_bias", "an object of token ids and numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias: must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}", "logit_bias")
    limits, biases = RANGES["logit_bias"], {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and int(key[:20]) < vocab_size):
            message = f"logit_bias: must be of token ids below {vocab_size}, the vocabulary, got {shown(key)}"
            raise RequestError(message, "logit_bias")
        if number("logit_bias", bias) not in limits:
            raise RequestError(f"logit_bias: must be a number from {limits.least} to {limits.most}, got {shown(bias)}",
                               "logit_bias")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def read_bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _wrong_type("bad_words", "a list of strings", value)
    if len(value) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words: must have at most {MAX_BAD_WORDS} strings, got {len(value)}", "bad_words")
    for one in value:
        if not 1 <= len(one) <= MAX_BAD_WORD_CHARS:
            limit = f"each string must have 1 to {MAX_BAD_WORD_CHARS} characters"
            raise RequestError(f"bad_words: {limit}, got {len(one)}", "bad_words")
    return tuple(value)


def num_top_logprobs(values: Mapping[str, Any]) -> int | None:
    """Best tokens wanted beside each one, None where no log-probabilities are."""
    asked: int | None = values["logprobs"]
    if "top_logprobs" not in values:
        return asked
    if not asked and values["top_logprobs"]:
        raise RequestError("top_logprobs: only allowed with logprobs: true", "top_logprobs")
    return (values["top_logprobs"] or 0) if asked else None


def check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    """Every element an integer of the vocabulary."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        wrong = next(one for one in token_ids if type(one) is not int)
        raise _wrong_type(name, "a list of integers", wrong)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(one for one in token_ids if not 0 <= one < vocab_size)
        raise RequestError(f"{name}: token id {wrong} is not in the vocabulary of {vocab_size}", name)


def read_stream_options(body: Mapping[str, Any], is_stream: bool) -> bool:
    """Whether a usage chunk is wanted."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong_type("stream_options", "an object", options)
    if not is_stream:
        raise RequestError("stream_options: only allowed with stream: true", "stream_options")
    for name in STREAM_OPTIONS[1:]:
        if Field("boolean", False).read(f"stream_options.{name}", options.get(name)):
            raise Unsupported(f"stream_options.{name}: not supported", "stream_options")
    wanted: bool = Field("boolean", False).read("stream_options.include_usage", options.get("include_usage"))
    return wanted
