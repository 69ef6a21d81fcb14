"""Step time against batch on a real model: "decode is flat from 1 to 32 streams, which give 26.7 times the tokens".

It is flat as long as reading the weights takes longer than computing with them. Where that ends is a property of the
hardware: 120 to 420 rows on the cards it was published for, a few on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import Any, TypeAlias

from ...clock import WallClock
from ...config import EngineConfig
from ...engine.llm import LLM
from ...engine.messages import Submit
from ...errors import ConfigError
from ...presets import engine_config
from ...request import SamplingParams
from ..machine_facts import machine_facts
from ..metrics import statistics
from ..workload import WorkloadSpec, requests_of
from .claims import Claim, Reproduction, columns, machine_text
from .met import Met

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PROMPT_TOKENS, WARM_STEPS = 128, 4
PUBLISHED_STEP_MS = {1: 78.05, 32: 74.77}
PUBLISHED_STREAM = {1: 12.76, 32: 10.66}    # tokens a second of one stream
PUBLISHED_TTFT_MS = {1: 121.0, 32: 2800.0}
MakeLLM: TypeAlias = Callable[[EngineConfig], LLM]
STEP = ("median wall time of the steps in which each of so many requests decodes one token and no prompt runs: plan, "
        "kernels, sampling and update")
WEAKEST = ("this processor and model against a 7B model on a card that is not named there; contexts are short, "
           f"{PROMPT_TOKENS} tokens and what was generated; in process, without HTTP")


def reproduce(make_llm: MakeLLM, model: str = "smollm2", batches: Sequence[int] = BATCHES, num_steps: int = 32,
              tell: Callable[[str], None] = lambda line: None) -> Reproduction:
    """num_steps: decode steps measured at each batch size."""
    if 1 not in batches:
        raise ConfigError(f"batches={list(batches)}: 1 is needed, to which the others are held")
    budget = max(512, 4 * max(batches))
    knobs = {"model": model, "max_num_seqs": max(batches), "prefix_cache": "none", "max_num_batched_tokens": budget,
             "max_model_len": PROMPT_TOKENS + _num_output_tokens(max(batches), num_steps, budget) + 1}
    with make_llm(engine_config("paceline", knobs)) as llm:
        _measure(llm, 1, num_steps)    # warm-up: pages, threads
        runs = []
        for batch in batches:
            runs.append(_measure(llm, batch, num_steps))
            tell(f"batch {batch}: {runs[-1]['step_ms']:.2f} ms a step")
        facts: dict[str, Any] = {"model": model, "fingerprint": llm.model.fingerprint, "machine": machine_facts()}
    return Reproduction(name="flat-decode", claims=_claims(runs), runs=[facts | run for run in runs],
                        text=[_table(runs), machine_text(facts["machine"])])


def _num_output_tokens(batch: int, num_steps: int, budget: int) -> int:
    """Enough that the first one still decodes when the last one's prompt has run, beside decodes, and so long after."""
    num_prompt_steps = ceil(batch * PROMPT_TOKENS / (budget - batch)) + 1
    return num_prompt_steps + WARM_STEPS + num_steps


def _measure(llm: LLM, batch: int, num_steps: int) -> dict[str, Any]:
    """One batch that starts at once, and decodes together once all prompts have run."""
    core, clock = llm.core, WallClock()
    num_output_tokens = _num_output_tokens(batch, num_steps, core.scheduler.config.max_num_batched_tokens)
    asked = requests_of(WorkloadSpec(
        name="fixed", num_requests=batch, prompt_tokens=str(PROMPT_TOKENS), output_tokens=str(num_output_tokens),
        first_token_id=min(1000, llm.model.vocab_size // 2), end_token_id=min(20_000, llm.model.vocab_size)), "salt")
    started_at = clock.now()
    met = Met(f"batch {batch}", started_at, {one.request_id: one.num_output_tokens for one in asked})
    for one in asked:
        sampling = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
        core.add(Submit(request_id=one.request_id, prompt_token_ids=one.prompt_token_ids or (), sampling=sampling,
                        arrival_time=started_at))
    seconds, decoding = [], set[str]()
    while core.has_work():
        is_whole = len(decoding) == batch    # before the step: nobody's prompt is left
        begun_at = clock.now()
        outputs = core.step()
        ended_at = clock.now()
        if is_whole and outputs.step_num_tokens == batch:
            seconds.append(ended_at - begun_at)
        for output in outputs.outputs:
            met(output, ended_at)
            decoding.add(output.request_id)
    measured = seconds[WARM_STEPS : WARM_STEPS + num_steps]
    ttfts = statistics([record.token_times[0] for record in met.records], "from the start of all to its first token")
    return {"batch": batch, "step_ms": 1e3 * median(measured), "least_ms": 1e3 * min(measured),
            "greatest_ms": 1e3 * max(measured), "steps": len(measured), "tokens_per_second": batch / median(measured),
            "stream_tokens_per_second": 1 / median(measured), "ttft_seconds": ttfts}


def knee(runs: Sequence[dict[str, Any]]) -> float | None:
    """The batch at which the flat line of batch 1 meets the line through zero that the two largest batches rise along;
    None where they do not rise."""
    if len(runs) < 3:
        return None
    below, top = sorted(runs, key=lambda run: int(run["batch"]))[-2:]
    slope = (top["step_ms"] - below["step_ms"]) / (top["batch"] - below["batch"])
    first = next(run for run in runs if run["batch"] == 1)
    return float(first["step_ms"] / slope) if slope > 0 else None


def _claims(runs: Sequence[dict[str, Any]]) -> list[Claim]:
    by_batch = {run["batch"]: run for run in runs}
    one = by_batch[1]
    claims: list[tuple[str, float | None, float | None, str, str]] = []
    for batch, run in by_batch.items():
        claims.append((f"step at batch {batch}", PUBLISHED_STEP_MS.get(batch), run["step_ms"], "ms", STEP))
    if (many := by_batch.get(32)) is not None:
        published = 32 * PUBLISHED_STREAM[32] / PUBLISHED_STREAM[1]
        claims += [
            ("all streams, batch 32 over 1", published, many["tokens_per_second"] / one["tokens_per_second"], "x",
             f"tokens a second of all streams together; {STEP}"),
            ("one stream, batch 32 over 1", PUBLISHED_STREAM[32] / PUBLISHED_STREAM[1],
             many["stream_tokens_per_second"] / one["stream_tokens_per_second"], "x",
             f"tokens a second of one stream; {STEP}"),
            ("TTFT, 32 at once over 1", PUBLISHED_TTFT_MS[32] / PUBLISHED_TTFT_MS[1],
             many["ttft_seconds"]["max"] / one["ttft_seconds"]["max"], "x",
             f"the last one's first token, if so many prompts of {PROMPT_TOKENS} tokens come at once")]
    claims.append((
        "knee", None, knee(runs), "rows", "batch at which the flat line of batch 1 meets the line through zero that "
        "the two largest batches rise along: below it memory is the limit, above it arithmetic"))
    return [Claim(what=what, kind="H", published=published, ours=ours, unit=unit, definition=definition,
                  weakest=WEAKEST)
            for what, published, ours, unit, definition in claims]


def _table(runs: Sequence[dict[str, Any]]) -> str:
    one = next(run for run in runs if run["batch"] == 1)
    rows = [[str(run["batch"]), "", f"{run['step_ms']:.2f}", f"{run['least_ms']:.2f}", f"{run['greatest_ms']:.2f}",
             f"{run['tokens_per_second']:.1f}", f"{run['tokens_per_second'] / one['tokens_per_second']:.2f}",
             f"{run['stream_tokens_per_second']:.1f}", f"{1e3 * run['ttft_seconds']['p50']:.0f}",
             f"{1e3 * run['ttft_seconds']['max']:.0f}"] for run in runs]
    titles = ["batch", "", "step ms", "least", "greatest", "tokens/s", "over batch 1", "a stream", "TTFT p50 ms", "max"]
    return "\n".join(columns(titles, rows))
