"""Values that cross to another process arrive as they were sent."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from paceline.engine.messages import Outputs
from paceline.request import FinishReason, StopMatch
from paceline.sched.flat import pickled_flat
from paceline.sched.outputs import EngineStats, RequestOutput, RequestTimeline
from paceline.sched.plan import ScoredToken
from paceline.sched.step_time import COEFFICIENTS, StepTime

STATS = EngineStats(**{name: number for number, name in enumerate(EngineStats.__dataclass_fields__)} | {
    "step_time": StepTime((0.5,) * len(COEFFICIENTS), 0.1, 7, 0.2)})    # type: ignore[arg-type]
PLAIN = RequestOutput(request_id="a", choice_index=0, token_ids=(5,), num_prompt_tokens=3)
FULL = RequestOutput(
    request_id="b", choice_index=2, token_ids=(1, 2), logprobs=(-0.5, -1.5), top_logprobs=(((1, -0.5),), ((2, -1.5),)),
    prompt_logprobs=(ScoredToken(4, -2.0, ()),), finish_reason=FinishReason.STOP, stop=StopMatch(text="x"),
    num_prompt_tokens=9, num_cached_tokens=8,
    timeline=RequestTimeline(arrived_at=1.0, first_scheduled_at=2.0, first_token_at=None, finished_at=3.0,
                             num_preemptions=1))


@pytest.mark.parametrize("value", [STATS.step_time, STATS, PLAIN, FULL, Outputs((PLAIN, FULL), STATS, 12, 0.25)],
                         ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_value_that_was_pickled_is_the_same_value(value: object, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(value, protocol))
    assert copy == value and type(copy) is type(value) and repr(copy) == repr(value)


def test_a_class_that_checks_its_values_is_not_taken() -> None:
    """Copies are made without the constructor."""

    @dataclass(frozen=True, slots=True)
    class Checked:
        value: int

        def __post_init__(self) -> None:
            assert self.value

    with pytest.raises(TypeError, match="Checked checks its values"):
        pickled_flat(Checked)
