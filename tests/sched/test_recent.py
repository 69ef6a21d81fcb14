"""The last numbers of a kind and their quantiles."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from paceline.sched.recent import Recent


@given(numbers=st.lists(st.integers(0, 20) | st.floats(0, 20)), most=st.integers(1, 12), share=st.floats(0.01, 1.0))
def test_a_quantile_is_the_nearest_rank_among_the_last_ones(numbers: list[float], most: int, share: float) -> None:
    recent: Recent[float] = Recent(most)
    for number in numbers:
        recent.add(number)
    kept = sorted(numbers[-most:])
    assert len(recent) == len(kept)
    assert recent.quantile(share) == (kept[ceil(share * len(kept)) - 1] if kept else None)
    beyond = [number for number in kept if number > 7]
    assert recent.quantile_beyond(7, share) == (beyond[ceil(share * len(beyond)) - 1] if beyond else None)
