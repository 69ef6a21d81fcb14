"""How far a cell is, on standard error: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections import Counter
from typing import TextIO

from .load_generator import Run

TERMINAL_SECONDS, LOG_SECONDS = 0.25, 10.0


class Progress:
    """Give it to run_cell as its watcher."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._told_at = -LOG_SECONDS
        self._width = 0

    def __call__(self, run: Run) -> None:
        if not self._is_due():
            return
        self._told_at = time.monotonic()
        text = line_of(run)
        if self._is_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _is_due(self) -> bool:
        return time.monotonic() - self._told_at >= (TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
        self._width = 0
        self._stream.write(f"{text}\n")
        self._stream.flush()


def line_of(run: Run) -> str:
    if run.is_warming_up:
        return f"{run.plan.name}: warming up, {len(run.records)} of {len(run.plan.warm_up)}"
    counts = Counter(record.status for record in run.records if not record.is_warm_up)
    failed = counts.total() - counts["ok"]
    seconds = max(run.measured_seconds, 1e-9)
    return (f"{run.plan.name}: {counts.total()} of {run.num_requests} ended, {run.num_under_way} under way, "
            f"{failed} failed, {run.num_tokens / seconds:.0f} output tokens/s")
