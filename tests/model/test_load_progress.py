"""What a long load shows: on a terminal a line that moves and goes, in a log one line at the end, else nothing."""

from __future__ import annotations

import io

import pytest

from paceline.clock import VirtualClock
from paceline.model.load_progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stream: io.StringIO, seconds_a_matrix: float, num_matrices: int = 20) -> str:
    clock = VirtualClock()
    progress = LoadProgress(stream, clock)
    for matrix in range(num_matrices):
        clock.advance(seconds_a_matrix)
        progress((matrix + 1) * 1_000_000, num_matrices * 1_000_000)
    progress.finish()
    return stream.getvalue()


@pytest.mark.parametrize("stream", (io.StringIO, Terminal))
def test_a_quick_load_shows_nothing(stream: type[io.StringIO]) -> None:
    assert load(stream(), 0.01) == ""


def test_on_a_terminal_a_line_moves_after_a_second_and_goes_at_the_end() -> None:
    shown = load(Terminal(), 0.25).split("\r")
    assert shown[1] == "paceline: packing weights,  20% of 20 million"
    assert len(shown) == 1 + 17 + 1 and shown[-2].endswith("100% of 20 million") and shown[-1] == "\033[K"


def test_many_small_matrices_do_not_redraw_it_for_each() -> None:
    assert load(Terminal(), 0.001, 3000).count("packing") <= 21


def test_a_log_gets_one_line_and_only_of_a_long_load() -> None:
    assert load(io.StringIO(), 0.4) == ""
    assert load(io.StringIO(), 1.5) == "paceline: packed 20 million weights in 30.0 s\n"


def test_a_load_that_fails_leaves_no_half_line() -> None:
    stream, clock = Terminal(), VirtualClock()
    progress = LoadProgress(stream, clock)
    clock.advance(2)
    progress(1, 10)
    progress.finish()
    assert stream.getvalue().endswith("\r\033[K")
