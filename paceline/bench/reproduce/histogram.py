"""Histograms of lines of text, several over one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NUM_BINS, WIDTH = 12, 40


def histogram(values: Mapping[str, Sequence[float]], unit: str) -> str:
    """Equal bins from 0 to the greatest value of all; a bar's full width is the fullest bin of all."""
    greatest = max((max(some) for some in values.values() if some), default=0.0)
    if greatest <= 0:
        return "no request ended: no histogram"
    counts = {name: counted(some, greatest) for name, some in values.items()}
    fullest = max(max(some) for some in counts.values())
    lines: list[str] = []
    for name, some in counts.items():
        lines += ["", f"{name} ({unit})"]
        for place, count in enumerate(some):
            begin, end = (greatest * edge / NUM_BINS for edge in (place, place + 1))
            lines.append(f"  {begin:8.2f} to {end:8.2f} {'#' * -(-count * WIDTH // fullest)} {count or ''}".rstrip())
    return "\n".join(lines[1:])


def counted(values: Sequence[float], greatest: float) -> list[int]:
    """How many fall into each bin; the greatest value falls into the last."""
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(int(value / greatest * NUM_BINS), NUM_BINS - 1)] += 1
    return counts
