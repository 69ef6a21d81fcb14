"""The engine's door: plain values in, plain values out. Both transports (thread, process) carry exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import RequestError
from ..request import SamplingParams
from ..sched.flat import pickled_flat
from ..sched.ledger import LedgerTotals
from ..sched.outputs import EngineStats, RequestOutput, RequestTimeline
from ..sched.reports import RequestReport

__all__ = ["Abort", "Answer", "Answered", "Ask", "AskPolicy", "AskRequests", "Died", "EngineStats", "KnobValue",
           "LedgerTotals", "Message", "News", "Outputs", "PolicyState", "Question", "Ready", "Rejected",
           "RequestOutput", "RequestReport", "RequestReports", "RequestTimeline", "Stop", "Stopped", "Submit",
           "SwitchPolicy", "Switched"]

KnobValue: TypeAlias = int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run this prompt. With num_choices > 1 choice i reports under `f"{request_id}:{i}"`, choice 0 under request_id."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    cache_extras: tuple[str, ...] = ()
    prompt_index: int = 0
    num_choices: int = 1
    program_id: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests and all their choices. Unknown and finished ids are no error."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop. `is_graceful`: first finish what was submitted."""

    is_graceful: bool


@dataclass(frozen=True, slots=True)
class SwitchPolicy:
    """Schedule by these from the next step on: a preset, knobs of SchedulerConfig, or a preset with knobs over it."""

    preset: str | None = None
    knobs: tuple[tuple[str, KnobValue], ...] = ()


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Which policies does the engine schedule by?"""


@dataclass(frozen=True, slots=True)
class AskRequests:
    """Where are these choices, and why?"""

    request_ids: tuple[str, ...]


Question: TypeAlias = SwitchPolicy | AskPolicy | AskRequests


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer this between two steps. The number comes back with the answer."""

    number: int
    question: Question


Message: TypeAlias = Submit | Abort | Stop | Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine is loaded. What its front must know to check requests at the door."""

    max_model_len: int       # tokens of prompt and output together, as far as the pool reaches
    num_blocks: int
    block_size: int          # tokens
    fingerprint: str         # names the numeric path (system_fingerprint)
    notices: tuple[str, ...] = ()    # what a person should know about this engine, a line each
    reads_priority: bool = True      # whether the ordering or the victim rule looks at a request's priority
    policy: PolicyState | None = None    # what it starts with; None: an engine that knows no policies by name


@pickled_flat
@dataclass(frozen=True, slots=True)
class Outputs:
    """One step's news. `step_num_tokens` and `step_duration_seconds` describe the step itself. The ledger comes now and
    then, and with the last step before there is nothing to do."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    step_num_tokens: int = 0
    step_duration_seconds: float = 0.0
    ledger: LedgerTotals | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The core refused a Submit that the door had let through; the request does not exist."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What the engine schedules by."""

    preset: str | None                              # whose values these are; None: no preset's
    knobs: tuple[tuple[str, KnobValue], ...]        # all of SchedulerConfig, and prefix_cache
    reads_priority: bool                            # as in Ready


@dataclass(frozen=True, slots=True)
class Switched:
    """What SwitchPolicy changed."""

    old: PolicyState
    new: PolicyState


@dataclass(frozen=True, slots=True)
class RequestReports:
    """In the order asked for; of those that run, wait, or have ended not too many others ago."""

    reports: tuple[RequestReport, ...]


Answer: TypeAlias = PolicyState | Switched | RequestReports


@dataclass(frozen=True, slots=True)
class Answered:
    """To the Ask of this number. An error: nothing has changed."""

    number: int
    answer: Answer | RequestError


@dataclass(frozen=True, slots=True)
class Died:
    """The loop has stopped on an exception, or never started; no more Outputs will come."""

    reason: str
    is_callers_mistake: bool = False    # a bad knob or model: one line tells it, no traceback is of use


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop has left as asked."""


News: TypeAlias = Ready | Outputs | Rejected | Answered | Died | Stopped
