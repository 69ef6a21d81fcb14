"""The bundle of policies a scheduler runs by: one frozen value, swapped whole. Names resolve in build.py."""

from __future__ import annotations

from dataclasses import dataclass

from .admission import AdmissionRule
from .batching import Regime
from .chunking import Chunking
from .gate import GateRule
from .ordering import Ordering
from .preemption import PreemptionRule, VictimRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    regime: Regime
    gate: GateRule
    ordering: Ordering
    admission: AdmissionRule
    preemption: PreemptionRule
    victim: VictimRule
    chunking: Chunking
