"""The lines of a journal as plain values, made from the engine's frozen ones by the names of their fields, so that a
new field of a plan, a request or a result is kept without a change here. docs/journal.md describes every line.

What may hold text or token ids is never kept: of requests and rows only numbers, flags and short names (ids, tenant)
pass, told apart by the declared type of the field; of a tuple at most its length. A plan's other parts (transfers,
victims, the refusal) hold block ids, request ids and numbers, and pass whole. Fields at their default are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from ..request import FinishReason, SamplingParams
from ..sched.outputs import EngineStats, RequestOutput
from ..sched.plan import RowResult, ScheduledRequest, SchedulerOutput, StepResult
from .messages import Submit

Line: TypeAlias = dict[str, Any]
Tables: TypeAlias = tuple[tuple[int, ...], ...]
Hashes: TypeAlias = Sequence[str]

NO_ROWS: Line = {"request_id": [], "num_tokens": [], "logits_offsets": []}
SCALARS = (int, float, str, type(None), Enum)
TOKEN_COUNTS = {"token_ids", "logprobs", "top_logprobs"}    # of a result: told by num_tokens already


def _is_scalar(kind: Any) -> bool:
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return all(isinstance(member, type) and issubclass(member, SCALARS) for member in members)


@cache
def scalar_fields(kind: type, *besides: str) -> tuple[Field[Any], ...]:
    """Fields that hold one number, flag, name or None; `besides` are left out."""
    types = get_type_hints(kind)
    return tuple(one for one in fields(kind) if one.name not in besides and _is_scalar(types[one.name]))


@cache
def tuple_fields(kind: type) -> tuple[Field[Any], ...]:
    types = get_type_hints(kind)
    return tuple(one for one in fields(kind) if get_origin(types[one.name]) is tuple and one.name not in TOKEN_COUNTS)


def given(value: Any, declared: Iterable[Field[Any]]) -> Line:
    """The fields that differ from their default."""
    values = ((one, getattr(value, one.name)) for one in declared)
    return {one.name: held for one, held in values if one.default is MISSING or held != one.default}


# --- requests

def request_fields(submit: Submit, block_hashes: Hashes, hashed: Callable[[str], str]) -> Line:
    """What of a request the schedule can depend on. `hashed` hides the cache extras, which may be a client's secret."""
    sampling = given(submit.sampling, scalar_fields(SamplingParams))
    if submit.sampling.stop_token_ids:
        sampling["stop_token_ids"] = submit.sampling.stop_token_ids
    line = given(submit, scalar_fields(Submit))
    if submit.cache_extras:
        line["cache_extras"] = [hashed(extra) for extra in submit.cache_extras]
    return line | {"num_prompt_tokens": len(submit.prompt_token_ids), "block_hashes": block_hashes,
                   "sampling": sampling}


def submit_of(request: Line, prompt_token_ids: tuple[int, ...]) -> Submit:
    """The request again, with stand-ins for its tokens. Raises TypeError for fields that this version does not know."""
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in request["sampling"].items()}
    named = {name: value for name, value in request.items()
             if name not in ("sampling", "num_prompt_tokens", "block_hashes", "prompt_token_ids")}
    named["cache_extras"] = tuple(named.get("cache_extras", ()))
    return Submit(prompt_token_ids=prompt_token_ids, sampling=SamplingParams(**sampling), **named)


# --- plans

@cache
def row_fields() -> tuple[str, ...]:
    """Fields of a plan that hold rows: these are written as columns, without their tokens."""
    types = get_type_hints(SchedulerOutput)
    return tuple(one.name for one in fields(SchedulerOutput) if ScheduledRequest in get_args(types[one.name]))


@cache
def plan_fields() -> tuple[Field[Any], ...]:
    return tuple(one for one in fields(SchedulerOutput) if one.name not in row_fields())


class PlanEncoder:
    """Plans as lines. Remembers the block tables of the last plan: a row tells its own only when they have changed."""

    def __init__(self) -> None:
        self._tables: dict[str, Tables] = {}

    def encode(self, plan: SchedulerOutput) -> Line:
        line = given(plan, plan_fields())
        before, self._tables = self._tables, {}
        for name in row_fields():
            if rows := getattr(plan, name):
                line[name] = self._columns(rows, before)
        return line

    def _columns(self, rows: tuple[ScheduledRequest, ...], before: dict[str, Tables]) -> dict[str, list[Any]]:
        self._tables |= {row.request_id: row.block_ids for row in rows}
        columns: dict[str, list[Any]] = {
            one.name: [getattr(row, one.name) for row in rows] for one in scalar_fields(ScheduledRequest)}
        columns["num_tokens"] = [len(row.token_ids) for row in rows]
        columns["logits_offsets"] = [row.logits_offsets for row in rows]
        columns["block_ids"] = [None if before.get(row.request_id) == row.block_ids else row.block_ids for row in rows]
        return columns


# --- results

def result_fields(result: StepResult) -> Line:
    """What was measured, and transfers that completed. Rows are told apart, one entry each."""
    line = given(result, scalar_fields(StepResult, "step_id"))
    return line | ({"transfers_done": result.transfers_done} if result.transfers_done else {})


def row_entry(result: RowResult, output: RequestOutput | None, block_hashes: Hashes, has_tokens: bool) -> int | Line:
    """How many tokens the row's request took, and with what end. A bare number where there is no more to tell.

    block_hashes are those of blocks that these tokens completed. No output: the request had ended before the step did.
    """
    if output is None:
        return 0
    entry = given(result, scalar_fields(RowResult, "request_id"))
    for one in tuple_fields(RowResult):
        if count := len(getattr(result, one.name)):
            entry[f"num_{one.name}"] = count
    if output.finish_reason is FinishReason.STOP:
        entry["is_stopped"] = True
    if block_hashes:
        entry["block_hashes"] = block_hashes
    if has_tokens and output.token_ids:
        entry["token_ids"] = output.token_ids
    return entry | {"num_tokens": len(output.token_ids)} if entry else len(output.token_ids)


def stats_fields(stats: EngineStats, before: EngineStats | None) -> Line:
    """The gauges and counters that have changed."""
    values = {one.name: getattr(stats, one.name) for one in fields(EngineStats)}
    return {name: value for name, value in values.items() if before is None or value != getattr(before, name)}


def ends(outputs: Iterable[RequestOutput]) -> list[Line]:
    """Who has ended, why, and when what happened to them."""
    return [
        {"request_id": output.request_id, "finish_reason": output.finish_reason,
         "num_prompt_tokens": output.num_prompt_tokens, "num_cached_tokens": output.num_cached_tokens,
         "timeline": output.timeline}
        for output in outputs if output.finish_reason is not None]


def rows_of(plan: Line) -> Line:
    """The columns of a plan's rows, as read from a line."""
    rows: Line = plan.get("rows", NO_ROWS)
    return rows


def fixed(entry: int | Mapping[str, Any]) -> Mapping[str, Any]:
    """A row's entry as read from a line, always with num_tokens."""
    return {"num_tokens": entry} if isinstance(entry, int) else entry


@dataclass(frozen=True, slots=True)
class Header:
    """The first line, as read."""

    version: int
    paceline: str
    fingerprint: str
    has_tokens: bool
    setup: Line
