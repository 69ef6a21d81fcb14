"""What the server needs of an engine, and nothing more. `engine/async_engine.AsyncEngine` fulfils it; so does a fake.

`model` may be read only when `state` is not "loading".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from ..engine.messages import Answer, EngineStats, Outputs, PolicyState, Question, RequestOutput, Submit

if TYPE_CHECKING:
    from ..model.chat_template import ChatTemplate
    from ..model.tokenizer import Tokenizer


class ServedModel(Protocol):
    """The facts about the model that a request is checked against."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def reads_priority(self) -> bool:
        """Whether a request's priority changes anything."""
        ...


class RequestStream(Protocol):
    """News of one Submit, all choices interleaved; ends when all have finished; raises EngineDead if the loop died."""

    def __aiter__(self) -> RequestStream: ...

    async def __anext__(self) -> RequestOutput: ...

    def abort(self) -> None: ...


class Engine(Protocol):
    """The engine's asyncio side. All of it is called on the event loop."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def state(self) -> str:
        """loading, ready, draining, dead or stopped."""
        ...

    async def until_dead(self) -> None: ...

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def policy(self) -> PolicyState | None:
        """What it schedules by; None while it loads."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def submit(self, message: Submit) -> RequestStream: ...

    async def ask(self, question: Question) -> Answer:
        """Raises RequestError where what was asked for cannot be, EngineDead where nobody can answer."""
        ...

    def check_room(self) -> None:
        """Raises Overloaded if no request at all would be accepted now."""
        ...

    def is_stalled(self, limit_seconds: float) -> bool: ...

    def add_listener(self, on_outputs: Callable[[Outputs], None]) -> None: ...

    async def drain(self, grace_seconds: float) -> None: ...

    async def stop(self) -> None: ...


SeedSource = Callable[[], int]           # a fresh seed for a request that brings none
EngineInfo = Mapping[str, str]           # facts about the cache, published as labels of vllm:cache_config_info
