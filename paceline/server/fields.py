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

from ..errors import RequestError, Unsupported
from .replies import shown

INT64 = 1 << 63
MAX_EXACT_FLOAT = 1 << 53       # beyond it a float no longer says which integer was meant
MAX_NUM_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class Field:
    """One value: `kind` is integer, number, boolean or string; limits are inclusive (characters for a string)."""

    kind: str
    default: Any = None
    least: float | None = None
    most: float | None = None

    def read(self, name: str, value: Any) -> Any:
        if value is None:
            return self.default
        value = KINDS[self.kind](name, value)
        measure = len(value) if self.kind == "string" else value
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


KINDS = {"integer": integer, "number": number, "boolean": boolean, "string": string}

COMMON: dict[str, Field] = {
    "model": Field("string", None, 1, 1024),
    "stream": Field("boolean", False),
    "max_tokens": Field("integer", None, 0),                   # 0: only completions with echo
    "max_completion_tokens": Field("integer", None, 0),        # wins over max_tokens
    "n": Field("integer", 1, 1, MAX_NUM_CHOICES),
    "temperature": Field("number", 1.0, 0, 2),
    "top_p": Field("number", 1.0, 0, 1),                       # 0: only the likeliest token
    "top_k": Field("integer", None, -1, INT64 - 1),            # -1 and 0: the whole vocabulary
    "seed": Field("integer", None, -INT64, INT64 - 1),
    "ignore_eos": Field("boolean", False),
    "user": Field("string", None, 0, 1024),                    # becomes the tenant
    "priority": Field("integer", 0, -(1 << 31), (1 << 31) - 1),
    "cache_salt": Field("string", None, 1, 1024),
    "timeout": Field("number", None, 0.001, 86400),            # seconds from arrival, after which the request ends
    "return_token_ids": Field("boolean", False),
}
COMPLETION: dict[str, Field] = COMMON | {
    "echo": Field("boolean", False),
    "add_special_tokens": Field("boolean", True),
}
CHAT: dict[str, Field] = COMMON | {
    "add_generation_prompt": Field("boolean", None),
    "continue_final_message": Field("boolean", None),
    "add_special_tokens": Field("boolean", False),
}
SHAPED = ("stop", "stop_token_ids", "stream_options")          # served, read by functions of their own
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
COMPLETION_SHAPED = ("prompt", *SHAPED)
CHAT_SHAPED = ("messages", *SHAPED)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
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
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {"suffix": ("",)}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
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
    return {name: field.read(name, body.get(name)) for name, field in table.items()}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises Unsupported for the first known field that asks for something we do not do."""
    for name, value in body.items():
        if value is None or name not in neutral or any(_is_same(value, accepted) for accepted in neutral[name]):
            continue
        accepted = " or ".join(["null", *(orjson.dumps(one).decode() for one in neutral[name])])
        raise Unsupported(f"{name}: not supported; only {accepted} is accepted, got {shown(value)}", name)


def _is_same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def check_best_of(body: Mapping[str, Any], num_choices: int) -> None:
    """best_of may only repeat n: choosing among more candidates is not served."""
    best_of = Field("integer", num_choices, 1).read("best_of", body.get("best_of"))
    if best_of < num_choices:
        raise RequestError(f"best_of: must be at least n ({num_choices}), got {best_of}", "best_of")
    if best_of > num_choices:
        raise Unsupported(f"best_of: not supported; only n ({num_choices}) is accepted, got {best_of}", "best_of")


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
