"""What a cell came to: from the records of its requests to one plain dictionary, each figure beside its formula.

Percentiles are numpy's, linear between neighbours; `std` is the population's. A percentile that rests on less than one
request beyond it (p99 of fewer than 100) is listed in `weak`. Only requests that ended well have latencies; the others
are counted by kind and count against goodput. Warm-up requests enter nothing, and their number is told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .measures import DEFINITIONS, Definitions, num_output_tokens, sent
from .records import RequestRecord
from .slo import LIMITED, Slo, slo_of

PERCENTILES = (50, 90, 95, 99)
LEAST_DELAY_BOUND_SECONDS = 0.005
DELAY_BOUND_SHARE = 0.01
CORE_SHARE_BOUND = 0.9
# Two-sided 95% quantiles of Student's t by degrees of freedom (from any table); beyond them the normal's.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
               2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
NORMAL_QUANTILE = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFacts:
    """What is known of a cell beside its requests' records."""

    name: str
    arrivals: str = "closed loop"
    concurrency: int | None = None                       # requests under way at most; None: no cap
    slos: Mapping[str | None, Slo] = field(default_factory=dict)
    definitions: str = "ours"
    loop_lags: Sequence[float] = ()                      # seconds a timer of the client's event loop was late
    loop_core_share: float | None = None                 # processor time of the client's event loop over time
    server_cache: tuple[int, int] | None = None          # prompt tokens (hit, looked up) by the server's counters
    server_preemptions: int | None = None


def summarise(records: Sequence[RequestRecord], cell: CellFacts) -> dict[str, Any]:
    """All figures of one cell. Seconds and tokens; JSON-able."""
    measured = [record for record in records if not record.is_warm_up]
    good = [record for record in measured if record.status == "ok"]
    definitions = DEFINITIONS[cell.definitions]
    facts: dict[str, Any] = {
        "cell": cell.name, "arrivals": cell.arrivals, "concurrency": cell.concurrency,
        "definitions": cell.definitions, "requests": _requests(records, measured, good)}
    facts |= {name: statistics([value for record in good for value in measure.values(record)], measure.formula)
              for name, measure in definitions.measures.items()}
    facts["throughput"] = _throughput(measured, good, definitions)
    facts["goodput"] = _goodput(measured, facts["throughput"]["window_seconds"], cell.slos)
    facts["lengths"] = _lengths(good)
    facts["cache_hit_rate"] = _cache_hit_rate(good, cell.server_cache)
    facts["preemptions"] = _preemptions(measured, cell.server_preemptions)
    facts["client"] = _client(measured, cell)
    return facts


def statistics(values: Sequence[float], formula: str) -> dict[str, Any]:
    """Percentiles, maximum, mean, population standard deviation and number of values; None where there are none."""
    found: dict[str, Any] = dict.fromkeys((*(f"p{q}" for q in PERCENTILES), "max", "mean", "std"))
    if len(values):
        found |= {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
        found |= {"max": float(max(values)), "mean": float(np.mean(values)), "std": float(np.std(values))}
    weak = [f"p{q}" for q in PERCENTILES if len(values) * (100 - q) < 100]
    return found | {"n": len(values), "weak": weak, "definition": formula}


def _requests(records: Sequence[RequestRecord], measured: Sequence[RequestRecord],
              good: Sequence[RequestRecord]) -> dict[str, Any]:
    failed = [record for record in measured if record.status != "ok"]
    examples = {record.status: record.error for record in reversed(failed)}
    return {
        "measured": len(measured), "ok": len(good), "failed": len(failed),
        "errors": {kind: {"count": count, "first": examples[kind]}
                   for kind, count in sorted(Counter(record.status for record in failed).items())},
        "finish_reasons": dict(sorted(Counter(record.finish_reason or "not told" for record in good).items())),
        "warm_up_excluded": len(records) - len(measured)}


def _throughput(measured: Sequence[RequestRecord], good: Sequence[RequestRecord],
                definitions: Definitions) -> dict[str, Any]:
    ends = [record.ended_at for record in measured if record.ended_at is not None]
    window = max(ends) - min(map(definitions.begin, measured)) if ends else 0.0
    num_output = sum(map(num_output_tokens, good))
    num_prompt = sum(record.prompt_tokens or record.asked_prompt_tokens or 0 for record in good)

    def rate(amount: int) -> float | None:
        return amount / window if window > 0 else None

    return {
        "requests_per_second": rate(len(good)), "output_tokens_per_second": rate(num_output),
        "prompt_tokens_per_second": rate(num_prompt), "total_tokens_per_second": rate(num_prompt + num_output),
        "window_seconds": window, "steady_output_tokens_per_second": _steady(measured),
        "definition": f"requests that ended well, and their tokens, over the window {definitions.window}",
        "steady_definition": "tokens that came between the first send and the last one, over that time: the load was "
                             "whole; none where all were sent at once"}


def _steady(measured: Sequence[RequestRecord]) -> float | None:
    sends = [record.sent_at for record in measured if record.sent_at is not None]
    if not sends or max(sends) <= min(sends):
        return None
    begin, end = min(sends), max(sends)
    tokens = sum(count for record in measured
                 for at, count in zip(record.token_times, record.token_counts, strict=True) if begin < at <= end)
    return tokens / (end - begin) if tokens else None


def _goodput(measured: Sequence[RequestRecord], window: float, slos: Mapping[str | None, Slo]) -> dict[str, Any] | None:
    if not slos:
        return None
    met: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for record in measured:
        slo = slo_of(record, slos)
        name = record.slo or "all"
        asked[name] += 1
        met[name] += record.status == "ok" if slo is None else slo.is_met_by(record)
    num_met = met.total()
    return {
        "requests_per_second": num_met / window if window > 0 else None,
        "share": num_met / len(measured) if measured else None, "met": num_met, "asked": len(measured),
        "by_class": {name: {"met": met[name], "asked": asked[name]} for name in sorted(asked)},
        "missed_by": _missed_by(measured, slos),
        "limits": {name or "all": slo.text() for name, slo in slos.items()},
        "definition": "requests that ended well and kept every limit of their class, over the window of throughput; "
                      "a failed request counts as missed, a limit that does not apply (TPOT of one token) as kept"}


def _missed_by(measured: Sequence[RequestRecord], slos: Mapping[str | None, Slo]) -> dict[str, int]:
    missed: Counter[str] = Counter()
    for record in measured:
        slo = slo_of(record, slos)
        if record.status != "ok":
            missed["failed"] += 1
        elif slo is not None:
            missed.update(word for word, limit in slo.limits.items()
                          if any(value > limit for value in LIMITED[word](record)))
    return dict(sorted(missed.items()))


def _lengths(good: Sequence[RequestRecord]) -> dict[str, Any]:
    """Asked against achieved: a comparison of servers that stop at different lengths is none."""
    prompts = [(record.asked_prompt_tokens, record.prompt_tokens) for record in good
               if record.asked_prompt_tokens is not None and record.prompt_tokens is not None]
    outputs = [(record.asked_output_tokens, num_output_tokens(record)) for record in good]
    chunks = [count for record in good for count in record.token_counts]
    return {
        "prompt_asked_mean": _mean([asked for asked, _ in prompts]),
        "prompt_achieved_mean": _mean([got for _, got in prompts]),
        "output_asked_mean": _mean([asked for asked, _ in outputs]),
        "output_achieved_mean": _mean([got for _, got in outputs]),
        "output_other_than_asked": sum(asked != got for asked, got in outputs),
        "tokens_per_chunk": _mean(chunks),
        "tokens_counted_by": dict(sorted(Counter(record.counted_by or "not told" for record in good).items())),
        "definition": "tokens as the server counted them (usage, or ids in the stream), over requests that ended well"}


def _cache_hit_rate(good: Sequence[RequestRecord], counters: tuple[int, int] | None) -> dict[str, Any]:
    told = [(record.cached_tokens, record.prompt_tokens) for record in good
            if record.cached_tokens is not None and record.prompt_tokens]
    if told:
        num_prompt = sum(prompt for _, prompt in told)
        return {"value": sum(cached for cached, _ in told) / num_prompt, "requests": len(told),
                "definition": "prompt tokens taken from a cache over prompt tokens, as each answer's usage tells"}
    if counters is not None and counters[1] > 0:
        return {"value": counters[0] / counters[1], "requests": len(good),
                "definition": "prefix cache hits over queries, in tokens, growth of the server's /metrics in the cell"}
    return {"value": None, "requests": 0, "definition": "not told: neither usage nor /metrics of the server has it"}


def _preemptions(measured: Sequence[RequestRecord], counted: int | None) -> dict[str, Any]:
    told = [record.preemptions for record in measured if record.preemptions is not None]
    if told:
        return {"value": sum(told), "definition": "of the cell's requests, as the engine tells"}
    return {"value": counted, "definition": "growth of the server's counter in the cell; none where it does not tell"}


def _client(measured: Sequence[RequestRecord], cell: CellFacts) -> dict[str, Any]:
    """Whether the client kept up, and the bounds that say so."""
    delays = [record.sent_at - (record.intended_at if record.released_at is None else record.released_at)
              for record in measured if record.sent_at is not None]
    ttfts = [record.token_times[0] - sent(record) for record in measured if record.token_times]
    bound = max(DELAY_BOUND_SHARE * float(np.percentile(ttfts, 50)) if ttfts else 0.0, LEAST_DELAY_BOUND_SECONDS)
    delay = statistics(delays, "sent - the moment from which only the client held the request (its intended time, or "
                               "when the cap on concurrency let it go)")
    lag = statistics(cell.loop_lags, "how late a timer of the client's event loop rang: news is read as late as that")
    share = cell.loop_core_share
    faults = [text for is_fault, text in (
        ((delay["p99"] or 0) > bound, f"p99 of schedule delay is above {1e3 * bound:.3g} ms"),
        ((lag["p50"] or 0) > bound, f"p50 of event loop lag is above {1e3 * bound:.3g} ms"),
        ((share or 0) > CORE_SHARE_BOUND, f"its event loop took over {CORE_SHARE_BOUND:.0%} of a core")) if is_fault]
    return {
        "is_valid": not faults, "bound_seconds": bound, "schedule_delay_seconds": delay, "loop_lag_seconds": lag,
        "core_share": share,
        "verdict": f"INVALID: the client was a bottleneck: {' and '.join(faults)}" if faults else "valid",
        "definition": "valid while p99 of schedule delay and p50 of event loop lag are within 1% of p50 TTFT (or 5 ms, "
                      "if that is more) and the loop within 90% of a core; p99 of the lag is the doubt of single times"}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of repeats with the half-width of its 95% interval by Student's t; no half-width for a single one."""
    count = len(values)
    half = None
    if count > 1:
        quantile = T_QUANTILES[count - 2] if count - 2 < len(T_QUANTILES) else NORMAL_QUANTILE
        half = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
    return {"mean": float(np.mean(values)), "half_width_95": half, "n": count, "least": float(min(values)),
            "greatest": float(max(values)), "definition": "over repeats: mean, and Student's t interval of 95%"}


# The figures that repeats are compared by: section, key.
REPEATED = tuple((name, key) for names, keys in (
    (("ttft_seconds", "tpot_seconds", "itl_pooled_seconds", "itl_seconds", "icl_seconds", "e2e_seconds",
      "normalised_latency_seconds", "service_ttft_seconds", "service_e2e_seconds"), ("p50", "p95", "p99", "mean")),
    (("throughput",), ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second")),
    (("goodput",), ("requests_per_second", "share")),
    (("cache_hit_rate",), ("value",))) for name in names for key in keys)


def over_repeats(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals of each figure over the summaries of one cell's repeats, by "section.key"."""
    found = {}
    for section, key in REPEATED:
        values = [summary[section][key] for summary in summaries if (summary.get(section) or {}).get(key) is not None]
        if values:
            found[f"{section}.{key}"] = interval(values)
    return found
