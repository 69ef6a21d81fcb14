"""How much of a KV budget holds tokens: reservations of Max, Pow2 and Oracle length against blocks of 16.

A reservation is a request's max_tokens under the admission that keeps blocks to the end of it: the longest a request
may be, the next power of two of what it will generate, or exactly that. The executor ends it where it ends. Blocks kept
that way need not lie together, which is the best that an allocator that reserves can do; the runs named "one piece" put
each reservation in one by the buddy rule, with an allocator that exists in this file only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ...engine.messages import RequestOutput, Submit
from ...kv.prefix_hash import PrefixHit
from ...request import Request
from ...sched.plan import Refusal, SchedulerOutput, StepResult
from ...sched.view import SchedulerView
from . import laws
from .claims import Claim, Reproduction
from .lab import Cell, Lab, Ran, id_of, request

BLOCK = 16
MAX_MODEL_LEN = 2048
KV_TOKENS = 982 * BLOCK          # 15.7 thousand: a 13B model in fp16 on a card of 40 GB
MEAN_PROMPT, MEAN_OUTPUT = 161, 338
LOAD = 0.8                       # of the rate at which blocks of 16 finish a burst
RESERVING = {"preset": "vllm", "admission": "reserve", "preemption": "never", "prefix_cache": "none"}
PAGED = {"preset": "vllm", "prefix_cache": "none"}
PUBLISHED_USE = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "blocks of 16": 96.3}
WORKLOAD = (
    f"prompts and outputs of exponential lengths, means {MEAN_PROMPT} and {MEAN_OUTPUT}, together at most "
    f"{MAX_MODEL_LEN}; a step gives each running request a token or runs a part of its prompt, and is the unit of time")
WEAKEST = (
    "the lengths are a law's, not those of the published runs; a step is taken to cost the same whatever runs in it; "
    "reservations are in whole blocks of 16, up to 15 tokens too long; journals of runs in one piece replay only with "
    "this file's allocator")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its true length, and the tokens that are reserved for its output."""

    num_prompt_tokens: int
    num_output_tokens: int

    def reserved(self, rule: str) -> int:
        most = MAX_MODEL_LEN - self.num_prompt_tokens
        by_rule = {"max": most, "pow2": power_of_two(self.num_output_tokens), "oracle": self.num_output_tokens}
        return min(by_rule[rule], most)

    def num_blocks(self, rule: str) -> int:
        return -(-(self.num_prompt_tokens + self.reserved(rule)) // BLOCK)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass
class KVUse:
    """A listener: tokens stored and tokens held, summed over the steps in which a request waits. `held` gives tokens
    by request; None: those of the blocks in the plan."""

    held: Mapping[str, int] | None = None
    num_steps: int = 0
    num_rows: int = 0
    num_stored: int = 0
    num_held: int = 0

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        if not plan.num_waiting:
            return
        self.num_steps += 1
        self.num_rows += plan.num_running
        for row in plan.rows:
            self.num_stored += row.num_computed_tokens + len(row.token_ids)
            self.num_held += len(row.block_ids[0]) * BLOCK if self.held is None else self.held[row.request_id]

    def on_request_finished(self, output: RequestOutput) -> None:
        pass


@dataclass
class Buddies:
    """An admission rule for the lab: a request starts where a free piece of its size is, rounded up to a power of two,
    whose first block is a multiple of that; the lowest such.

    It is asked last, and whom it lets in starts in the same step, so it may note the place with its answer.
    """

    num_blocks: int
    sizes: Mapping[str, int]    # blocks by request
    places: dict[str, tuple[int, int]] = field(default_factory=dict)    # first block and end

    def __call__(self, view: SchedulerView, request: Request, hit: PrefixHit) -> Refusal | None:
        running = {one.request_id for one in view.running}
        self.places = {one: place for one, place in self.places.items() if one in running}
        size = power_of_two(self.sizes[request.request_id])
        for start in range(0, self.num_blocks - size + 1, size):
            if all(end <= start or begin >= start + size for begin, end in self.places.values()):
                self.places[request.request_id] = (start, start + size)
                return None
        return Refusal(request.request_id, "contiguous_blocks", size, 0)


def reproduce(lab: Lab, num_requests: int = 400, kv_tokens: int = KV_TOKENS) -> Reproduction:
    asked = asked_of(num_requests)
    paged = run(lab, asked, kv_tokens, None)
    rate = LOAD * num_requests / paged["steps"]
    runs = [_loaded(lab, asked, kv_tokens, paged, rate)]
    for in_one_piece in (False, True):
        for rule in ("max", "pow2", "oracle"):
            burst = run(lab, asked, kv_tokens, rule, in_one_piece)
            runs.append(_loaded(lab, asked, kv_tokens, burst, rate))
    claims = [claim for facts in runs for claim in claims_of(facts, runs[0])]
    return Reproduction(name="kv-waste", claims=claims, runs=runs, text=[f"The load: {WORKLOAD}."])


def asked_of(num_requests: int) -> list[Asked]:
    prompts = laws.lengths("exponential", MEAN_PROMPT, num_requests, seed=1)
    outputs = laws.lengths("exponential", MEAN_OUTPUT, num_requests, seed=2)
    pairs = ((min(prompt, MAX_MODEL_LEN // 2), output) for prompt, output in zip(prompts, outputs, strict=True))
    return [Asked(prompt, min(output, MAX_MODEL_LEN - prompt)) for prompt, output in pairs]


def run(lab: Lab, asked: Sequence[Asked], kv_tokens: int, rule: str | None, in_one_piece: bool = False,
        rate: float | None = None) -> dict[str, Any]:
    """One allocator on one load: a burst, or arrivals at a rate. rule None: blocks of 16 as they are needed."""
    cell = _cell(asked, kv_tokens, rule, rate)
    if in_one_piece:
        cell = replace(cell, name=f"{cell.name}-one-piece")
    sizes = None if rule is None else {id_of(number): one.num_blocks(rule) for number, one in enumerate(asked)}
    use = KVUse(None if sizes is None else {one: BLOCK * size for one, size in sizes.items()})
    ran = lab.run(cell, [use], admission=Buddies(cell.num_blocks, sizes) if in_one_piece and sizes else None)
    return _facts(cell, ran, use, rule, in_one_piece)


def _cell(asked: Sequence[Asked], kv_tokens: int, rule: str | None, rate: float | None) -> Cell:
    gaps = [0.0] * len(asked) if rate is None else laws.drawn("exponential", 1 / rate, len(asked), seed=3)
    requests: list[Submit] = []
    ends_at: dict[str, int] = {}
    for number, (one, arrival) in enumerate(zip(asked, accumulate(gaps), strict=True)):
        num_output = one.num_output_tokens if rule is None else one.reserved(rule)
        submit = request(number, num_output, (2,) * one.num_prompt_tokens, arrival)
        requests.append(replace(submit, sampling=replace(submit.sampling, ignore_eos=False)))
        ends_at[submit.request_id] = one.num_prompt_tokens + one.num_output_tokens - 1
    knobs = PAGED if rule is None else RESERVING
    load = "burst" if rate is None else "arrivals"
    return Cell(
        name=f"kv-waste-{rule or 'blocks'}-{load}", preset=knobs["preset"], requests=requests, ends_at=ends_at,
        knobs={name: value for name, value in knobs.items() if name != "preset"},
        num_blocks=kv_tokens // BLOCK, block_size=BLOCK, max_model_len=MAX_MODEL_LEN)


def _facts(cell: Cell, ran: Ran, use: KVUse, rule: str | None, in_one_piece: bool) -> dict[str, Any]:
    budget = cell.num_blocks * BLOCK
    output_tokens = {output.request_id: cell.ends_at[output.request_id] + 1 - output.num_prompt_tokens
                     for output in ran.finished}
    latencies = [(output.timeline.finished_at - output.timeline.arrived_at) / output_tokens[output.request_id]
                 for output in ran.finished if output.timeline is not None]
    return {
        "allocator": rule or "blocks of 16", "in_one_piece": in_one_piece, "kv_tokens": budget, "load": WORKLOAD,
        "requests": len(ran.finished), "steps": ran.stats.num_steps, "output_tokens": ran.stats.num_generation_tokens,
        "tokens_per_step": ran.stats.num_generation_tokens / ran.stats.num_steps,
        "mean_batch": use.num_rows / use.num_steps if use.num_steps else None,
        "waste_of_held_percent": 100 * (1 - use.num_stored / use.num_held) if use.num_held else None,
        "use_of_budget_percent": 100 * use.num_stored / (budget * use.num_steps) if use.num_steps else None,
        "steps_while_waiting": use.num_steps, "preemptions": ran.stats.num_preemptions,
        "normalised_latency_mean": sum(latencies) / len(latencies), "journal": ran.journal}


def _loaded(lab: Lab, asked: Sequence[Asked], kv_tokens: int, burst: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The burst's facts with what arrivals at the rate, in requests a step, come to."""
    rule = burst["allocator"] if burst["allocator"] in ("max", "pow2", "oracle") else None
    loaded = run(lab, asked, kv_tokens, rule, burst["in_one_piece"], rate)
    return {**burst, "requests_per_step": rate, "normalised_latency_at_rate": loaded["normalised_latency_mean"],
            "journal_at_rate": loaded["journal"]}


def claims_of(facts: Mapping[str, Any], paged: Mapping[str, Any]) -> list[Claim]:
    is_paged = facts is paged
    name = "blocks of 16" if is_paged else f"{facts['allocator']}{', one piece' if facts['in_one_piece'] else ''}"
    is_published = is_paged or facts["in_one_piece"]
    use = PUBLISHED_USE[facts["allocator"]] if is_published else None
    waste = ("below 4" if is_paged else "60 to 80") if is_published else None
    found: list[tuple[str, Any, float | None, str, str]] = [
        ("use", use, facts["use_of_budget_percent"], "%",
         "tokens stored over tokens of the budget, over the steps of a burst in which a request waits"),
        ("waste", waste, None if facts["use_of_budget_percent"] is None else 100 - facts["use_of_budget_percent"], "%",
         "100 % less the use: reserved and not filled, rounded up, or free in pieces too small"),
        ("mean batch", None, facts["mean_batch"], "requests", "running requests in the same steps, mean"),
        ("throughput", None, facts["tokens_per_step"], "tokens/step", "output tokens of the burst over all its steps"),
        ("normalised latency", None, facts["normalised_latency_at_rate"], "steps/token",
         f"mean over requests of arrival to end over output tokens, arrivals at random at {LOAD:.0%} of the rate at "
         "which blocks of 16 finish the burst")]
    if not is_paged:
        gain = paged["tokens_per_step"] / facts["tokens_per_step"]
        found.append(("blocks of 16 over it", "2 to 4", gain, "x", "ratio of the two throughputs"))
    return [Claim(what=f"{name}: {what}", kind="S", published=published, ours=ours, unit=unit, weakest=WEAKEST,
                  definition=f"{definition}, on the load of the runs")
            for what, published, ours, unit, definition in found]
