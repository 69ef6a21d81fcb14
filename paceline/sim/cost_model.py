"""What a step costs, for executors that run none. The form is that of sched/step_time.py, which fits it to steps that
did run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from ..errors import ConfigError
from ..sched.plan import SchedulerOutput
from ..sched.step_time import COEFFICIENTS, features_of
from .sim_executor import StepSeconds


def fitted(coefficients: Sequence[float]) -> StepSeconds:
    """Seconds of a plan by coefficients in the order of COEFFICIENTS, such as a StepTime exports."""
    known = tuple(coefficients)
    if len(known) != len(COEFFICIENTS) or not all(value >= 0.0 for value in known) or not any(known):
        raise ConfigError(f"coefficients: seconds of {', '.join(COEFFICIENTS)}, none negative and not all 0, "
                          f"got {list(known)}")

    def step_seconds(plan: SchedulerOutput) -> float:
        return sum(map(mul, known, features_of(plan)), 0.0)

    return step_seconds
