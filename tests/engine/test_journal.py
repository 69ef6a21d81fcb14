"""A journal replays to the same plans, holds no text and no token, and never stops the engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from paceline import build
from paceline.clock import VirtualClock
from paceline.engine.core import EngineCore
from paceline.engine.events import EngineEvents
from paceline.engine.journal import Journal
from paceline.engine.journal_file import JournalDropped, JournalError
from paceline.engine.replay import Journaled, Replay, Replayed
from paceline.errors import PromptTooLong
from paceline.sched.scheduler import Scheduler
from paceline.sched.setup import SchedulerSetup

from ..fakes import Setup, Stage, make_request, policies_of, submit_of
from ..sched.test_exactness_machine import Engine

KEY = b"k" * 32


class Lines:
    """Where a journal goes in memory."""

    def __init__(self) -> None:
        self.content = b""

    def put(self, line: bytes) -> None:
        self.content += line

    def close(self) -> str | None:
        return None


def setup_of(stage: Stage) -> SchedulerSetup:
    setup = stage.setup
    return SchedulerSetup(
        scheduler=stage.scheduler.config, prefix_cache=setup.prefix_cache, num_blocks=setup.num_blocks,
        block_size=setup.block_size, windows=tuple(group.window for group in setup.groups),
        max_model_len=setup.max_model_len, eos_token_ids=setup.eos_token_ids)


class Recorded:
    """A stage that keeps a journal."""

    def __init__(self, setup: Setup, has_tokens: bool = False) -> None:
        def report(listener, error) -> None:
            raise error

        events = EngineEvents(report)
        self.lines = Lines()
        self.stage = Stage(setup, events)
        self.setup = setup_of(self.stage)    # as it starts: a switch changes the scheduler's
        self.journal = Journal(self.lines, self.setup, KEY, has_tokens)
        events.attach_recorder(self.journal)

    def replay(self, path: Path) -> Replayed:
        self.journal.close()
        path.write_bytes(self.lines.content)
        return replay(path)


def replay(path: Path) -> Replayed:
    return Replay(Journaled.read(str(path)), build.build_scheduler, build.build_policies).run()


def busy(**setup) -> Recorded:
    """Preemptions, prefix hits, forks with copies, an abort, and a switch."""
    recorded = Recorded(Setup(**({"num_blocks": 16, "max_num_batched_tokens": 12} | setup)))
    stage = recorded.stage
    for index in range(6):
        stage.add(make_request(f"r{index}", 5 + 3 * index, 12, salt=index % 2, arrival_time=float(index),
                               num_choices=1 + index % 3, cache_extras=("tenant's secret",) * (index == 5)))
    for _ in range(4):
        stage.step()
    stage.abort("r3", "stranger")
    stage.switch(ordering="priority", victim="lowest_priority")
    stage.run()
    assert stage.num_preemptions and stage.scheduler.stats().prefix_cache_hits
    assert any(plan.transfers for plan in stage.plans)
    return recorded


def test_a_journal_replays_to_the_same_plans(tmp_path: Path) -> None:
    recorded = busy()
    seen = recorded.replay(tmp_path / "journal")
    assert seen.difference is None
    assert (seen.num_steps, seen.num_requests) == (len(recorded.stage.plans), 6)
    assert {output.request_id: output.timeline for output in seen.finished} == {
        name: output.timeline for name, output in recorded.stage.finished.items()}


def scheduler_of(setup: SchedulerSetup) -> Scheduler:
    """As build.py makes it, with policies that it would refuse together."""
    scheduler = build.build_scheduler(replace(setup, scheduler=replace(setup.scheduler, preemption="recompute")))
    scheduler.switch_policies(policies_of(setup.scheduler), setup.scheduler)
    return scheduler


class JournaledEngine(Engine):
    """Whatever the exactness machine does to an engine replays to the same plans, ends and counters."""

    def make_stage(self, setup: Setup) -> Stage:
        self.recorded = Recorded(setup)
        return self.recorded.stage

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "recorded"):
            self.check(self.recorded)

    def check(self, recorded: Recorded) -> None:
        lines = [json.loads(line) for line in recorded.lines.content.splitlines()]
        journaled = Journaled("memory", lines[0], recorded.setup, tuple(enumerate(lines[1:], start=2)))
        seen = Replay(journaled, scheduler_of, policies_of).run()
        assert seen.difference is None, str(seen.difference)
        assert seen.num_steps == len(recorded.stage.plans)


JournaledEngine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=20, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck))
TestJournaledEngine = JournaledEngine.TestCase


def test_what_an_engine_core_tells_replays_too(tmp_path: Path) -> None:
    """Refusals at the scheduler's door, deadlines, aborts and steps, in the order in which the core met them."""
    lines, clock, stage = Lines(), VirtualClock(), Stage(Setup(num_blocks=10))
    core = EngineCore(stage.scheduler, stage.executor, clock, stage.events)
    journal = Journal(lines, setup_of(stage), KEY)
    stage.events.attach_recorder(journal)
    for name, num_tokens, deadline in (("a", 5, 3.0), ("b", 7, None), ("c", 6, None)):
        core.add(replace(submit_of(make_request(name, num_tokens, 9)), deadline=deadline))
    with pytest.raises(PromptTooLong):
        core.add(submit_of(make_request("long", 50)))
    core.step()
    core.abort(("b",))
    clock.advance(4.0)
    while core.has_work():
        clock.advance(0.5)
        core.step()
    journal.close()
    (tmp_path / "journal").write_bytes(lines.content)
    seen = replay(tmp_path / "journal")
    assert seen.difference is None
    events = [json.loads(line)["event"] for line in lines.content.splitlines()]
    assert events[:8] == ["header", "add", "add", "add", "refuse", "step", "abort", "expire"]
    assert {output.request_id: output.finish_reason.value for output in seen.finished if output.finish_reason} == {
        "a": "timeout", "b": "abort", "c": "length"}


# ---- what is found

def changed(path: Path, change) -> Replayed:
    """Replays busy()'s journal after `change` was applied to its lines."""
    lines = [json.loads(line) for line in busy().lines.content.splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replay(path)


def step_line(lines: list[dict], step: int) -> dict:
    return next(line for line in lines if line["event"] == "step" and line["plan"]["step_id"] == step)


COLUMNS = ("request_id", "num_computed_tokens", "num_tokens", "logits_offsets", "block_ids")


@pytest.mark.parametrize("step", [0, 7, 20])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_plan_is_the_first_difference(tmp_path: Path, step: int, column: str) -> None:
    def change(lines: list[dict]) -> None:
        step_line(lines, step)["plan"]["rows"][column][0] = "changed"

    found = changed(tmp_path / "journal", change).difference
    assert found is not None
    assert (found.step, found.field, found.recorded) == (step, f"plan.rows.{column}[0]", "changed")
    assert found.request_id is not None and f"step {step}" in str(found)


def test_a_row_that_was_not_planned_is_a_difference(tmp_path: Path) -> None:
    def change(lines: list[dict]) -> None:
        for column in step_line(lines, 7)["plan"]["rows"].values():
            column.append(column[0])

    found = changed(tmp_path / "journal", change).difference
    assert found is not None and (found.step, found.field) == (7, "plan.rows.request_id")


def test_a_changed_input_shows_where_it_first_matters(tmp_path: Path) -> None:
    def forget_a_prefix(lines: list[dict]) -> None:
        hashes = next(line for line in lines if line["event"] == "add" and line["request"]["request_id"] == "r4")
        hashes["request"]["block_hashes"][0] = "0123456789abcdef"

    found = changed(tmp_path / "journal", forget_a_prefix).difference
    assert found is not None and found.step is not None and found.step > 0


@pytest.mark.parametrize(("name", "value"), [("ended", []), ("stats", {"num_steps": 99})])
def test_changed_ends_and_counters_are_found_too(tmp_path: Path, name: str, value) -> None:
    def change(lines: list[dict]) -> None:
        line = next(line for line in lines if line["event"] == "step" and line["ended"])
        line[name] = value

    found = changed(tmp_path / "journal", change).difference
    assert found is not None and found.field.startswith(name)


def test_a_request_that_is_accepted_though_it_was_refused_is_a_difference(tmp_path: Path) -> None:
    def change(lines: list[dict]) -> None:
        lines[1] |= {"event": "refuse", "reason": "too long"}

    found = changed(tmp_path / "journal", change).difference
    assert found is not None and (found.line, found.replayed) == (2, "accepted")


# ---- files that are not whole

def test_a_journal_that_was_cut_off_replays_up_to_the_cut(tmp_path: Path) -> None:
    content, path = busy().lines.content, tmp_path / "journal"
    for length in range(len(content) // 2, len(content) // 2 + 400, 7):
        path.write_bytes(content[:length])
        assert replay(path).difference is None
    assert replay(path).num_steps > 5


def test_a_damaged_journal_is_told_with_its_line(tmp_path: Path) -> None:
    lines, path = busy().lines.content.splitlines(keepends=True), tmp_path / "journal"
    for damage in (b"{\n", b"[]\n", b'{"event": "picnic"}\n', b'{"event": "step"}\n', b"\xff\xfe\n", lines[0]):
        path.write_bytes(b"".join([*lines[:8], damage, *lines[9:]]))
        with pytest.raises(JournalError, match="line 9"):
            replay(path)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "no journal"), (b'{"event": "head', "no journal"), (b'{"event": "add"}\n', "line 1"),
    (b'{"event": "header", "version": 99}\n', "format 99"),
    (b'{"event": "header", "version": 1, "setup": {}}\n', "line 1"), (b"\x00\x01\n", "line 1")])
def test_a_file_that_is_no_journal(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=said):
        replay(path)


def test_the_plan_of_a_step_that_never_landed_is_kept_and_replayed(tmp_path: Path) -> None:
    recorded = Recorded(Setup())
    recorded.stage.add(make_request("a", 9))
    recorded.stage.step()
    recorded.stage.schedule()
    seen = recorded.replay(tmp_path / "journal")
    assert (seen.num_steps, seen.difference) == (1, None)
    assert json.loads(recorded.lines.content.splitlines()[-1])["event"] == "lost"


# ---- what a journal tells

def test_no_token_and_no_text_is_in_a_journal_unless_asked_for() -> None:
    prompt = tuple(range(70_001, 70_031))
    contents = []
    for has_tokens in (False, True):
        recorded = Recorded(Setup(), has_tokens)
        request = make_request("a", prompt, 8, cache_extras=("open sesame",))
        request.sampling = replace(request.sampling, stop=("abracadabra",))
        recorded.stage.add(request)
        recorded.stage.run()
        contents.append(recorded.lines.content)
    for secret in (b"open sesame", b"abracadabra"):
        assert not any(secret in content for content in contents)
    # Whole numbers only: any five digits may stand in a hash or in the fraction of a time.
    numbers = [{*map(int, re.findall(rb"(?<![\w.])\d{5}(?![\w.])", content))} for content in contents]
    assert not numbers[0] & {*prompt} and numbers[1] >= {*prompt}
    assert b'_token_ids":[' not in contents[0].partition(b"\n")[2] and b'"token_ids"' not in contents[0]


def test_padding_rows_tell_no_token_either() -> None:
    recorded = Recorded(Setup(regime="static_padded", num_blocks=400))
    recorded.stage.add(*(make_request(f"r{index}", tuple(range(70_001, 70_012)), 2 + 6 * index) for index in range(2)))
    recorded.stage.run()
    assert any(plan.padding for plan in recorded.stage.plans)
    assert b'"padding":{' in recorded.lines.content and b"token_ids" not in recorded.lines.content.partition(b"\n")[2]


def test_equal_prefixes_have_equal_hashes_in_one_journal_and_others_in_the_next() -> None:
    def hashes(key: bytes) -> list[list[str]]:
        lines, stage = Lines(), Stage(Setup())
        journal = Journal(lines, setup_of(stage), key)
        stage.events.attach_recorder(journal)
        stage.add(make_request("a", 12), make_request("b", 20), make_request("c", 12, salt=1),
                  make_request("d", 12, cache_extras=("x",)))
        return [line["request"]["block_hashes"] for line in map(json.loads, lines.content.splitlines()[1:])]

    a, b, c, d = hashes(KEY)
    assert a == b[:3] and len({*a, *b, *c, *d}) == 5 + 3 + 3
    assert not {*a} & {*hashes(b"o" * 32)[0]}


def test_a_journal_that_cannot_be_written_is_dropped_with_one_notice_and_the_engine_goes_on() -> None:
    class Full(Lines):
        def put(self, line: bytes) -> None:
            super().put(line)
            if self.content.count(b"\n") > 5:
                raise JournalDropped("the disk is full")

    told: list[str] = []
    stage = Stage(Setup(), EngineEvents(lambda listener, error: told.append(str(error))))
    stage.events.attach_recorder(Journal(Full(), setup_of(stage), KEY))
    stage.add(*(make_request(f"r{index}", 9, 8, salt=index) for index in range(4)))
    assert len(stage.run().finished) == 4
    assert told == ["the disk is full"] and not stage.events.recorders
