"""Two regimes on one load and one KV budget: "vLLM serves 30 to 100 % more requests a second than TGI, whose P99 is
200 to 500 ms above".

On one engine and one set of kernels the difference is the schedule alone: reserve and never preempt, with prompts that
gather and then stall decode, against blocks on demand, preemption and chunks that share steps. In virtual time it is
exact for a given step-time model; on a real model it is measured; between two servers it is all that differs between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...clock import WallClock
from ...config import EngineConfig
from ...engine.llm import LLM
from ...engine.messages import Submit
from ...presets import engine_config
from ...request import SamplingParams
from ...sim.cost_model import fitted
from ...sim.run import run_closed_loop
from ..machine_facts import machine_facts
from ..metrics import CellFacts, summarise
from ..records import Asked, RequestRecord
from ..workload import WorkloadSpec, requests_of
from .claims import Claim, Reproduction, columns, machine_text
from .histogram import histogram
from .lab import Cell, Lab
from .met import Met, Refusals

PRESETS = ("tgi", "vllm")
MAX_MODEL_LEN = 2560            # the longest request of the load has 2,500 tokens
# Step-time models of the virtual runs, in the order of COEFFICIENTS. Two cores: docs/benchmarks.md, engine steps
# without HTTP, rounded. A flat card: the 75 ms at batch 1 to 32 that flat-decode quotes, and 10,000 prompt tokens a
# second, which are assumed.
COSTS: Mapping[str, tuple[float, ...]] = {
    "virtual, two cores": (2.3e-3, 0.5e-3, 1e-6, 0.43e-3, 1.6e-7),
    "virtual, flat card": (75e-3, 0.0, 0.0, 0.1e-3, 0.0),
}
PUBLISHED_GAIN, PUBLISHED_P99 = "+30 to +100", "+200 to +500"
LOAD = "a closed loop of so many clients, prompts of 50 to 2,000 tokens and outputs of 10 to 500, evenly spread"
WEAKEST = {
    **dict.fromkeys(COSTS, "the schedule is exact, the seconds are those of a linear model of a step's cost"),
    "engine": "one machine, one model, one run a cell; no HTTP, so a full queue refuses nobody",
    "server": "one run a cell; the servers may differ in kernels, memory, model and version, and the client shares the "
              "machine with them",
}
MakeLLM: TypeAlias = Callable[[EngineConfig], LLM]
Tell: TypeAlias = Callable[[str], None]
OnServer: TypeAlias = Callable[["Plan", str, int, Tell], "Ran"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run beside the virtual runs. model None: no engine. servers: URLs, the first the one that the others are
    held to."""

    num_requests: int = 60
    concurrency: Sequence[int] = (1, 4, 8, 16)
    num_kv_blocks: int = 384
    model: str | None = "smollm2"
    servers: Sequence[str] = ()
    seed: int = 0

    def requests(self, cell: str, prompts: str = "ids", end_token_id: int = 20_000) -> list[Asked]:
        """The same lengths in every cell, other tokens in each."""
        spec = WorkloadSpec(name="uniform", num_requests=self.num_requests, prompts=prompts, seed=self.seed,
                            first_token_id=min(1_000, end_token_id // 2), end_token_id=end_token_id)
        return requests_of(spec, cell)


@dataclass
class Ran:
    """One cell: who, where, with how many clients, and what its requests met."""

    place: str          # one of COSTS | engine | server
    contestant: str     # a preset, or a URL
    concurrency: int
    records: Sequence[RequestRecord]
    more: Mapping[str, Any] = field(default_factory=dict)
    loop_lags: Sequence[float] = ()    # of a client in a process of its own

    @property
    def name(self) -> str:
        return cell_name(self.place, self.contestant, self.concurrency)

    def facts(self) -> dict[str, Any]:
        summary = summarise(self.records, CellFacts(name=self.name, concurrency=self.concurrency,
                                                    loop_lags=self.loop_lags))
        names = ("requests", "throughput", "e2e_seconds", "ttft_seconds", "tpot_seconds", "lengths", "client")
        return {"place": self.place, "contestant": self.contestant, "concurrency": self.concurrency,
                **{name: summary[name] for name in names}, **self.more}


def reproduce(lab: Lab, make_llm: MakeLLM, plan: Plan, tell: Tell = lambda line: None,
              on_server: OnServer | None = None) -> Reproduction:
    """on_server: runs a cell of plan.servers (on_server.py); needed where there are any."""
    ran: list[Ran] = []
    for turn, concurrency in enumerate(plan.concurrency):
        order = PRESETS if turn % 2 == 0 else PRESETS[::-1]    # contestants alternate
        ran += [virtual(lab, plan, cost, preset, concurrency) for cost in COSTS for preset in order]
        if plan.model is not None:
            ran += [engine(make_llm, plan, plan.model, preset, concurrency, tell) for preset in order]
        if on_server is not None:
            ran += [on_server(plan, url, concurrency, tell) for url in plan.servers[:: 1 if turn % 2 == 0 else -1]]
    facts = [one.facts() for one in ran]
    machines = [machine_text(one["machine"]) for one in facts if "machine" in one][:1]
    return Reproduction(name="tgi-vs-vllm", claims=_claims(facts, plan), runs=facts,
                        text=[_table(facts), *_histograms(ran), *machines])


def cell_name(place: str, contestant: str, concurrency: int) -> str:
    return f"{place.replace(', ', '-').replace(' ', '-')}-{contestant}-{concurrency}"


def virtual(lab: Lab, plan: Plan, cost: str, preset: str, concurrency: int) -> Ran:
    """On the executor without a model."""
    name = cell_name(cost, preset, concurrency)
    asked, refusals = plan.requests(name), Refusals()
    met = Met(name, 0.0, {one.request_id: one.num_output_tokens for one in asked})
    ran = lab.run(Cell(
        name=f"tgi-vs-vllm-{name}", preset=preset, knobs={}, requests=[_submit(one) for one in asked],
        num_blocks=plan.num_kv_blocks, block_size=16, max_model_len=MAX_MODEL_LEN, concurrency=concurrency,
        step_seconds=fitted(COSTS[cost])), [refusals], watch=met)
    return Ran(cost, preset, concurrency, met.records, {
        "preemptions": ran.stats.num_preemptions, "recomputed_tokens": ran.stats.num_recomputed_tokens,
        "refusals": dict(refusals.steps), "steps": ran.stats.num_steps, "step_time": list(COSTS[cost]),
        "journal": ran.journal})


def engine(make_llm: MakeLLM, plan: Plan, model: str, preset: str, concurrency: int, tell: Tell) -> Ran:
    """On a real model, in this process."""
    name, clock = cell_name("engine", preset, concurrency), WallClock()
    config = engine_config(preset, {"model": model, "num_kv_blocks": plan.num_kv_blocks, "block_size": 16,
                                    "max_model_len": MAX_MODEL_LEN})
    with make_llm(config) as llm:
        asked, refusals = plan.requests(name, end_token_id=min(llm.model.vocab_size, 20_000)), Refusals()
        warm_up = [_submit(one, "warm-up-") for one in asked[:1]]
        run_closed_loop(llm.core, clock, warm_up, concurrency)
        before = llm.core.scheduler.stats()
        llm.core.events.attach(refusals)
        met = Met(name, clock.now(), {one.request_id: one.num_output_tokens for one in asked})
        run_closed_loop(llm.core, clock, [_submit(one) for one in asked], concurrency, met)
        after = llm.core.scheduler.stats()
    tell(f"{name}: {len(met.records)} requests in {clock.now() - met.started_at:.0f} s")
    return Ran("engine", preset, concurrency, met.records, {
        "preemptions": after.num_preemptions - before.num_preemptions,
        "recomputed_tokens": after.num_recomputed_tokens - before.num_recomputed_tokens,
        "refusals": dict(refusals.steps), "steps": after.num_steps - before.num_steps,
        "warm_up_requests": len(warm_up), "fingerprint": llm.model.fingerprint, "machine": machine_facts(),
        "step_time": list(after.step_time.coefficients)})


def _submit(asked: Asked, prefix: str = "") -> Submit:
    sampling = SamplingParams(max_tokens=asked.num_output_tokens, temperature=0.0, ignore_eos=True)
    return Submit(request_id=f"{prefix}{asked.request_id}", prompt_token_ids=asked.prompt_token_ids or (),
                  sampling=sampling, arrival_time=0.0)


# --- what is told


def _claims(facts: Sequence[Mapping[str, Any]], plan: Plan) -> list[Claim]:
    claims: list[Claim] = []
    by_cell = {(one["place"], one["contestant"], one["concurrency"]): one for one in facts}
    for place, base, other in _pairs(facts):
        for concurrency in plan.concurrency:
            first, second = (by_cell[place, who, concurrency] for who in (base, other))
            claims += _pair_claims(f"{place}, {concurrency} clients: ", first, second)
    return claims


def _pairs(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(place, the one that is held to, the other), presets before servers."""
    found = [(place, *PRESETS) for place in (*COSTS, "engine") if any(one["place"] == place for one in facts)]
    urls = list(dict.fromkeys(one["contestant"] for one in facts if one["place"] == "server"))
    return [*found, *(("server", urls[0], url) for url in urls[1:])]


def _pair_claims(where: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Claim]:
    rates = [one["throughput"]["requests_per_second"] for one in (first, second)]
    tails = [one["e2e_seconds"]["p99"] for one in (first, second)]
    gain = 100 * (rates[1] / rates[0] - 1) if all(rates) else None
    late = 1e3 * (tails[0] - tails[1]) if None not in tails else None
    base, other, place = first["contestant"], second["contestant"], first["place"]
    asked = [
        (f"requests a second of {other} above {base}", PUBLISHED_GAIN, gain, "%",
         "requests that ended well over the time from the first send to the last end"),
        (f"P99 of {base} above {other}", PUBLISHED_P99, late, "ms", "P99 of the time from send to last token")]
    return [Claim(what=where + what, kind="S" if place in COSTS else "H", published=published, ours=ours, unit=unit,
                  definition=f"{definition}; {LOAD}", weakest=WEAKEST[place])
            for what, published, ours, unit, definition in asked]


def _table(facts: Sequence[Mapping[str, Any]]) -> str:
    rows = [[f"{one['place']}, {one['contestant']}", str(one["concurrency"]),
             _figure(one["throughput"]["requests_per_second"], "{:.3f}"),
             *(_figure(one["e2e_seconds"][name], "{:.2f}") for name in ("p50", "p95", "p99", "max")),
             _figure(one["ttft_seconds"]["p99"], "{:.2f}"), _figure(one.get("preemptions"), "{}"),
             ", ".join(f"{limit} {count}" for limit, count in sorted(one["refusals"].items())) or "none"]
            for one in sorted(facts, key=lambda one: (one["place"], one["concurrency"], one["contestant"]))]
    titles = ["", "clients", "requests/s", "E2E s p50", "p95", "p99", "max", "TTFT p99", "preempted",
              "steps in which the head was refused"]
    return "\n".join(columns(titles, rows))


def _figure(value: Any, form: str) -> str:
    return "not told" if value is None else form.format(value)


def _histograms(ran: Sequence[Ran]) -> list[str]:
    """Of each place at the most clients, one scale for all its contestants."""
    texts = []
    most = max(one.concurrency for one in ran)
    for place in dict.fromkeys(one.place for one in ran):
        values = {f"{place}, {one.contestant}, {most} clients": [
            record.ended_at - record.intended_at for record in one.records if record.ended_at is not None]
            for one in ran if one.place == place and one.concurrency == most}
        texts.append(histogram(values, "seconds from send to last token"))
    return texts
