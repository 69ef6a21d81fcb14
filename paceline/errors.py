"""The kinds of failure, each with one mechanism.

The caller's mistake is a typed exception raised before anything is queued. Scarcity is not an error: it is a
`Refusal` value in the plan, and the request waits. A row without a usable token is no exception either: it is a
`RowResult.failure`, which ends that one request. A bug of ours is an InvariantError, which nobody catches.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything a caller of this package may want to catch."""


class ConfigError(EngineError):
    """A bad knob: unknown name, value out of range, impossible combination. Command line: exit status 2."""


class ModelError(EngineError):
    """A model that cannot be served: missing or damaged file, unknown family, wrong tensor. Exit status 2."""


class RequestError(EngineError):
    """A bad request: HTTP 400. `param` is the field at fault, as the client spelled it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(RequestError):
    """The prompt leaves no room for one generated token. Carries both numbers."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, param: str = "prompt") -> None:
        super().__init__(
            f"{param}: {num_prompt_tokens} tokens leave no room to generate; "
            f"prompt and output together are limited to {max_model_len} tokens here",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type[PromptTooLong], tuple[int, int, str | None]]:
        # An engine in its own process sends its errors as values; the default would call us with the message alone.
        return PromptTooLong, (self.num_prompt_tokens, self.max_model_len, self.param)


class Unsupported(RequestError):
    """A known parameter that we do not implement. Refused by name, never ignored."""


class Overloaded(EngineError):
    """The queue is full: HTTP 429 (or 503) with Retry-After. `limit` is the knob that said no."""

    def __init__(self, message: str, retry_after_seconds: int, limit: str = "max_queue") -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.limit = limit


class EngineDead(EngineError):
    """The engine loop has stopped; see __cause__. HTTP 503."""


class InvariantError(AssertionError):
    """A bug in this package. Never caught: the engine stops loudly and every open stream is told."""
