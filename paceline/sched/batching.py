"""The batching regime: whether requests may join the running batch in this step. Asked once a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from .view import SchedulerView

RegimeRule: TypeAlias = Callable[[SchedulerView], bool]


def continuous(view: SchedulerView) -> bool:
    """The gate is always open: requests join and leave at any step."""
    return True


REGIMES: Mapping[str, RegimeRule] = {"continuous": continuous}
