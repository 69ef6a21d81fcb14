"""What must be free before a request starts. A rule answers None (start) or a Refusal naming the limit that said no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import TypeAlias

from ..kv.prefix_hash import PrefixHit
from ..request import Request
from .plan import Refusal
from .view import SchedulerView

AdmissionRule: TypeAlias = Callable[[SchedulerView, Request, PrefixHit], Refusal | None]


def watermark(view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
    """Blocks for every token known now, and a margin left for the running ones to grow into."""
    # Alone there is nobody to leave a margin for, and a request that just fits must not wait for ever.
    num_margin = ceil(view.config.watermark * view.kv.num_blocks) if view.running else 0
    num_needed = view.kv.num_blocks_to_start(request, hit)
    num_available = view.kv.num_free_blocks - num_margin
    if num_needed <= num_available:
        return None
    return Refusal(request.request_id, "num_kv_blocks", num_needed, max(num_available, 0))


ASSURING_ADMISSIONS: frozenset[str] = frozenset({"reserve"})    # whoever they let in never runs out of blocks
ADMISSIONS: Mapping[str, AdmissionRule] = {"watermark": watermark}
