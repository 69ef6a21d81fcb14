"""One record a request: who, what, how long, how it ended. Never the prompt, the output, or a key.

Access opens a note for each request and writes it when the answer is complete; Reply adds what was generated.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from hashlib import blake2s
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from .generation import Generation
from .metrics import durations
from .openai import Call

LOGGER = logging.getLogger("paceline.access")
QUIET_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})    # asked every few seconds: told at debug
NOTE = "paceline.note"
CLIENT_CLOSED_REQUEST = 499    # nginx's number: the client left before its answer began
PHASES = {"request_queue_time_seconds": "queue_seconds", "request_prefill_time_seconds": "prefill_seconds",
          "request_decode_time_seconds": "decode_seconds"}


@dataclass(slots=True)
class RequestNote:
    """What is known so far of one request."""

    request_id: str
    method: str
    path: str
    tenant: str | None = None       # the key's, by name
    started_at: float = field(default_factory=time.monotonic)
    generated: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        return logging.DEBUG if self.path in QUIET_PATHS else logging.INFO

    def write(self, status: int | None) -> None:
        if not LOGGER.isEnabledFor(self.level):
            return
        fields = {
            "id": self.request_id, "method": self.method, "route": quote(self.path[:200]),
            "status": CLIENT_CLOSED_REQUEST if status is None else status,
            "seconds": round(time.monotonic() - self.started_at, 4),
        }
        if self.tenant is not None:
            fields["tenant"] = self.tenant
        LOGGER.log(self.level, "request", extra={"fields": fields | self.generated})


def note_generation(scope: Scope, call: Call, generation: Generation) -> None:
    """Adds tokens, phases and ends. The phases are those of the choice that ended last."""
    note: RequestNote | None = scope.get(NOTE)
    if note is None or not LOGGER.isEnabledFor(logging.INFO):
        return
    note.generated = {
        "call": call.call_id, "model": call.model_name[:200], "stream": call.is_stream,
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in call.prompts),
        "output_tokens": generation.num_completion_tokens,
        "finish_reason": ",".join(sorted({choice.end for choice in generation.choices})) or "length",
    }
    if note.tenant is None and call.submits and call.submits[0].tenant != "default":
        # What clients send as `user` may be a name or an address.
        note.generated["tenant"] = "user:" + blake2s(call.submits[0].tenant.encode(), digest_size=6).hexdigest()
    ends = [(choice.timeline, choice.num_tokens) for choice in generation.choices if choice.timeline is not None]
    if ends:
        phases = durations(*max(ends, key=lambda end: end[0].finished_at))
        note.generated |= {name: round(phases[key], 4) for key, name in PHASES.items() if key in phases}
        note.generated["preemptions"] = sum(timeline.num_preemptions for timeline, _ in ends)
