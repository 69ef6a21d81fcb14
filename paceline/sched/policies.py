"""The bundle of policies a scheduler runs by: one frozen value, swapped whole. Names resolve in build.py."""

from __future__ import annotations

from dataclasses import dataclass

from .admission import AdmissionRule
from .batching import RegimeRule
from .chunking import ChunkingRule
from .gate import GateRule
from .ordering import Ordering
from .preemption import PreemptionRule, VictimRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    regime: RegimeRule
    gate: GateRule
    ordering: Ordering
    admission: AdmissionRule
    preemption: PreemptionRule
    victim: VictimRule
    chunking: ChunkingRule
