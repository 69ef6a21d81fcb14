"""The line of progress, on a terminal and in a file."""

from __future__ import annotations

import io
from typing import Any

from paceline.bench import progress
from paceline.bench.load_generator import CellPlan
from paceline.bench.records import Asked

from .virtual_loop import measured


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: Any) -> list[str]:
    monkeypatch.setattr(progress, "TERMINAL_SECONDS", 0.0)
    told = progress.Progress(stream)
    asked = [Asked(request_id=f"r{number}", num_output_tokens=2, prompt_token_ids=(1,)) for number in range(3)]
    measured(asked, CellPlan(name="c", concurrency=1, ramp_in_seconds=0.0), told, first_seconds=1.0, gap_seconds=0.0)
    told.say("done")
    return stream.getvalue().split("\n")


def test_a_terminal_has_one_line_that_changes_and_then_the_result(monkeypatch: Any) -> None:
    line, *rest = shown(Terminal(), monkeypatch)
    states = [state.strip() for state in line.split("\r") if state.strip()]
    assert states == ["c: 1 of 3 ended, 0 under way, 0 failed, 2 output tokens/s",
                      "c: 2 of 3 ended, 0 under way, 0 failed, 2 output tokens/s",
                      "c: 3 of 3 ended, 0 under way, 0 failed, 2 output tokens/s", "done"] and rest == [""]


def test_a_file_has_a_line_now_and_then(monkeypatch: Any) -> None:
    first = "c: 1 of 3 ended, 0 under way, 0 failed, 2 output tokens/s"
    assert shown(io.StringIO(), monkeypatch) == [first, "done", ""]
