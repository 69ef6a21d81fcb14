"""What a person sees of a long load: on a terminal a line that moves, in a log one line when it is over."""

from __future__ import annotations

from typing import TextIO

from ..clock import Clock

QUIET_SECONDS = 1.0      # a load that takes no longer shows nothing
LOG_SECONDS = 10.0       # one that takes longer leaves a line behind, in a log too
REDRAW_SECONDS = 0.1


class LoadProgress:
    """Called with (weights packed so far, weights in all). The engine's own thread or process writes it, so it needs no
    message: both transports leave standard error as it is."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream, self._clock, self._is_terminal = stream, clock, stream.isatty()
        self._started_at = clock.now()
        self._drawn_at: float | None = None
        self._num_weights = 0

    def __call__(self, num_done: int, num_total: int) -> None:
        self._num_weights, now = num_done, self._clock.now()
        last = self._started_at + QUIET_SECONDS if self._drawn_at is None else self._drawn_at + REDRAW_SECONDS
        if self._is_terminal and now >= last:
            self._drawn_at = now
            self._write(f"\rpaceline: packing weights, {num_done / num_total:4.0%} "
                        f"of {num_total / 1e6:,.0f} million")

    def finish(self) -> None:
        """The load is over, or has failed."""
        seconds = self._clock.now() - self._started_at
        if self._drawn_at is not None:
            self._write("\r\033[K")    # erases the line
        if seconds >= LOG_SECONDS and self._num_weights:
            self._write(f"paceline: packed {self._num_weights / 1e6:,.0f} million weights in {seconds:.1f} s\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
