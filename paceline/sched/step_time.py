"""How long a step takes, learned from the steps that ran. Pure: durations are handed in, nothing is fetched.

A step's seconds are those its decoders wait for it: from the end of the step before it, where that one went over into
it, so that what the host does between two steps is learned with the rest.

    seconds = constant
            + decode_row   * rows that run one token
            + decode_key   * keys those rows read: their positions, summed
            + prefill_token * tokens of all other rows
            + prefill_pair * pairs of a token of those rows and a key it sees

No coefficient is negative. Fitted by least squares of relative errors with exponential forgetting: each step adds its
features, divided by its duration, to the normal equations, and one pass of non-negative coordinate descent (Franc,
Hlavac and Navara, "Sequential coordinate-wise algorithm for the non-negative least squares problem", 2005) moves the
coefficients on from where they stood. A feature not seen for long keeps its coefficient: forgetting scales both sides
of its equation.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

from .flat import pickled_flat
from .plan import SchedulerOutput
from .recent import Recent

FORGETTING = 0.98     # a step counts half after 34 more: loads and contention of a machine change
NUM_PASSES = 4        # of coordinate descent, a step
FAINTEST = 1e-200     # below this an equation has been forgotten down to rounding errors; its coefficient stays

MOST_OVERRUNS = 256    # steps of the recent past that say how far steps exceed what was predicted
FEWEST_OVERRUNS = 16   # fewer say nothing
HELD_IN = 0.98         # the share of those steps that the margin covers
MOST_MARGIN = 1 / 3    # of a target: beyond that the machine is at fault, and smaller chunks help nobody

COEFFICIENTS = ("constant", "decode_row", "decode_key", "prefill_token", "prefill_pair")
Features: TypeAlias = tuple[float, float, float, float, float]    # in the order of COEFFICIENTS


@pickled_flat
@dataclass(frozen=True, slots=True)
class StepTime:
    """The coefficients, in seconds and in the order of COEFFICIENTS, as a value to export.

    relative_error: the running mean of |predicted - measured| / measured, each step predicted before it was learned.
    overrun_seconds: what HELD_IN of the last steps that ran prompts beside decodes exceeded their prediction by, at
    most; 0 where they did not, or there were too few.
    """

    coefficients: tuple[float, ...] = (0.0,) * len(COEFFICIENTS)
    relative_error: float = 0.0
    num_observations: int = 0
    overrun_seconds: float = 0.0


UNKNOWN = StepTime()


def features_of(plan: SchedulerOutput) -> Features:
    """What the time of this step depends on. Padding rows decode."""
    num_decodes = num_keys = num_tokens = num_pairs = 0
    for row in plan.all_rows:
        count, start = len(row.token_ids), row.num_computed_tokens
        if count == 1:
            num_decodes += 1
            num_keys += start
        else:
            num_tokens += count
            num_pairs += pairs(count, start)
    return (1.0, num_decodes, num_keys, num_tokens, num_pairs)


def pairs(num_tokens: int, start: int) -> int:
    """Keys that a run of tokens beginning at position `start` sees, each token counted with its own."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepTimeModel:
    """Learns from every step; answers at any time."""

    def __init__(self) -> None:
        size = len(COEFFICIENTS)
        self.coefficients = [0.0] * size
        self.relative_error = 0.0
        self.num_observations = 0
        self.most_prefill_tokens = 0    # of one step; beyond it there is nothing to tell from
        self._overruns: Recent[float] = Recent(MOST_OVERRUNS)
        self._gram = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size

    def observe(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step ran. Steps without rows or without a duration teach nothing."""
        if not plan.rows or not seconds > 0.0:
            return
        features = features_of(plan)
        if self.num_observations:
            self._note_error(features, seconds)
        self.num_observations += 1
        self.most_prefill_tokens = max(self.most_prefill_tokens, int(features[3]))
        self._learn([feature / seconds for feature in features])

    def _note_error(self, features: Features, seconds: float) -> None:
        predicted = self.predict(features)
        weight = max(1 - FORGETTING, 1 / self.num_observations)
        self.relative_error += weight * (min(abs(predicted / seconds - 1), 1.0) - self.relative_error)
        _, num_decodes, _, num_prompt_tokens, _ = features
        if num_decodes and num_prompt_tokens:
            self._overruns.add(seconds - predicted)

    def predict(self, features: Features) -> float:
        return sum(map(mul, self.coefficients, features), 0.0)

    @property
    def overrun_seconds(self) -> float:
        overrun = self._overruns.quantile(HELD_IN)
        return 0.0 if overrun is None or len(self._overruns) < FEWEST_OVERRUNS else max(overrun, 0.0)

    def margin_seconds(self, target_seconds: float) -> float:
        """How far below the target a prediction has to stay so that HELD_IN of the steps hold it.

        Seconds, not a share of the prediction: where the machine takes something away whatever a step is made of, a
        share would grow as chunks shrink, until nothing is left of them.
        """
        known = len(self._overruns) >= FEWEST_OVERRUNS
        margin = self.overrun_seconds if known else 2 * self.relative_error * target_seconds
        return min(margin, MOST_MARGIN * target_seconds)

    def largest_prefill(
        self, target_seconds: float, num_decodes: int, num_decode_keys: int, start: int, most: int
    ) -> int:
        """The most prompt tokens, beginning at position `start`, beside these decodes so that the step takes no longer
        than the target; at most `most`, 0 where even one is too many."""
        low, high = 0, most + 1    # low fits or is 0, high does not
        while high - low > 1:
            middle = (low + high) // 2
            features = (1.0, num_decodes, num_decode_keys, middle, pairs(middle, start))
            low, high = (middle, high) if self.predict(features) <= target_seconds else (low, middle)
        return low

    def exported(self) -> StepTime:
        return StepTime(tuple(self.coefficients), self.relative_error, self.num_observations, self.overrun_seconds)

    def _learn(self, scaled: list[float]) -> None:
        """scaled: features over duration, so that the right-hand side of every observation is 1."""
        for row, (equation, feature) in enumerate(zip(self._gram, scaled, strict=True)):
            self._target[row] = FORGETTING * self._target[row] + feature
            for column, other in enumerate(scaled):
                equation[column] = FORGETTING * equation[column] + feature * other
        for _ in range(NUM_PASSES):
            for row, equation in enumerate(self._gram):
                if equation[row] > FAINTEST:
                    rest = self._target[row] - sum(map(mul, equation, self.coefficients))
                    self.coefficients[row] = max(self.coefficients[row] + rest / equation[row], 0.0)
