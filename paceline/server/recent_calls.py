"""The last calls that were accepted, for those who ask where theirs is.

Who comes with the same key, with one of the same tenant or with the admin key may see a call; without keys, everybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.messages import RequestReport
from ..sched.choices import choice_id
from .openai import Call
from .replies import HttpError
from .request_log import RequestNote

MAX_CALLS = 4096


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call with the ids of all its choices, those of a prompt together."""

    call_id: str
    x_request_id: str
    owner: str | None
    choice_ids: tuple[str, ...]

    def may_be_seen_by(self, note: RequestNote) -> bool:
        return note.is_admin or note.owner == self.owner


class RecentCalls:
    """By both names. A client may use an x-request-id again; it then means the later call."""

    def __init__(self) -> None:
        self._by_call_id: OrderedDict[str, CallRecord] = OrderedDict()
        self._call_ids: dict[tuple[str | None, str], str] = {}    # (owner, x-request-id) -> call id

    def add(self, call: Call, note: RequestNote) -> None:
        choices = tuple(choice_id(submit.request_id, index) for submit in call.submits
                        for index in range(submit.num_choices))
        self._by_call_id[call.call_id] = CallRecord(call.call_id, note.request_id, note.owner, choices)
        self._call_ids[note.owner, note.request_id] = call.call_id
        if len(self._by_call_id) > MAX_CALLS:
            _, oldest = self._by_call_id.popitem(last=False)
            if self._call_ids.get((oldest.owner, oldest.x_request_id)) == oldest.call_id:
                del self._call_ids[oldest.owner, oldest.x_request_id]

    def find(self, name: str, note: RequestNote) -> CallRecord:
        """Raises a 404 that does not tell whether somebody else has such a request."""
        call_id = self._call_ids.get((note.owner, name), name)
        record = self._by_call_id.get(call_id)
        if record is None and note.is_admin:
            record = next((one for one in reversed(self._by_call_id.values()) if one.x_request_id == name), None)
        if record is None or not record.may_be_seen_by(note):
            raise not_found(name)
        return record


def not_found(name: str) -> HttpError:
    return HttpError(404, f"request_id: {name[:128]!r} is no request of the last {MAX_CALLS} that you may see",
                     "request_not_found", "request_id")


def told(record: CallRecord, reports: Sequence[RequestReport]) -> dict[str, Any]:
    """The answer. A choice that the engine does not know is not born yet: its prompt is being computed; or the call was
    over before it was."""
    known = {report.request_id: report for report in reports}
    choices = [{"index": index} | (asdict(known[one]) if one in known else {"request_id": one, "status": "unknown"})
               for index, one in enumerate(record.choice_ids)]
    return {"id": record.call_id, "object": "request", "x_request_id": record.x_request_id, "choices": choices}
