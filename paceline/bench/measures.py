"""The words of a benchmark, each with its formula: what one request adds to TTFT, TPOT, ITL and the others.

Other generators give the same words to other quantities, so a set of definitions is a named table: `ours`, and those of
vllm, guidellm and aiperf for laying figures beside theirs. In the formulas: `intended` is when the load wanted the
request sent, `sent` when the client sent it, `first` and `last` when its first and last chunk with tokens came, `ended`
when its answer was complete, n its output tokens as the server counted them. All values are seconds.

The other tools' formulas were read in their sources (vllm/benchmarks, guidellm, aiperf), as of 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from .records import RequestRecord

Values = Callable[[RequestRecord], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity: its formula, for people, and the values a request adds to it (none where it has no meaning)."""

    formula: str
    values: Values


@dataclass(frozen=True, slots=True)
class Definitions:
    """What one tool means by its words. `window` is the time that throughput is counted over."""

    measures: Mapping[str, Measure]
    window: str
    begin: Callable[[RequestRecord], float]


def num_output_tokens(record: RequestRecord) -> int:
    """As the server counted; where it does not tell, the tokens of the chunks."""
    return record.output_tokens if record.output_tokens is not None else sum(record.token_counts)


def sent(record: RequestRecord) -> float:
    return record.intended_at if record.sent_at is None else record.sent_at


def gaps(record: RequestRecord) -> list[float]:
    """Between one chunk with tokens and the next."""
    times = record.token_times
    return [later - earlier for earlier, later in pairwise(times)]


def ttft_from_intended(record: RequestRecord) -> list[float]:
    return [record.token_times[0] - record.intended_at] if record.token_times else []


def ttft_from_sent(record: RequestRecord) -> list[float]:
    return [record.token_times[0] - sent(record)] if record.token_times else []


def e2e_from_intended(record: RequestRecord) -> list[float]:
    return [] if record.ended_at is None else [record.ended_at - record.intended_at]


def e2e_from_sent(record: RequestRecord) -> list[float]:
    return [] if record.ended_at is None else [record.ended_at - sent(record)]


def last_from_sent(record: RequestRecord) -> list[float]:
    return [record.token_times[-1] - sent(record)] if record.token_times else []


def tpot(record: RequestRecord) -> list[float]:
    num_tokens = num_output_tokens(record)
    if num_tokens < 2 or not record.token_times:
        return []
    return [(record.token_times[-1] - record.token_times[0]) / (num_tokens - 1)]


def tpot_with_first(record: RequestRecord) -> list[float]:
    num_tokens = num_output_tokens(record)
    return [(record.token_times[-1] - sent(record)) / num_tokens] if num_tokens and record.token_times else []


def mean_gap(record: RequestRecord) -> list[float]:
    found = gaps(record)
    return [sum(found) / len(found)] if found else []


def greatest_gap(record: RequestRecord) -> list[float]:
    found = gaps(record)
    return [max(found)] if found else []


def normalised_from_intended(record: RequestRecord) -> list[float]:
    num_tokens = num_output_tokens(record)
    return [(record.ended_at - record.intended_at) / num_tokens] if num_tokens and record.ended_at is not None else []


def normalised_from_sent(record: RequestRecord) -> list[float]:
    num_tokens = num_output_tokens(record)
    return [(record.ended_at - sent(record)) / num_tokens] if num_tokens and record.ended_at is not None else []


_TPOT = Measure("(last - first) / (n - 1), one value a request; none where n < 2", tpot)
_POOLED = Measure("time between one chunk with tokens and the next, POOLED over all requests: long answers weigh more; "
                  "a chunk may hold several tokens", gaps)

OURS = Definitions(
    measures={
        "ttft_seconds": Measure("first - intended, one value a request (response time)", ttft_from_intended),
        "tpot_seconds": _TPOT,
        "itl_pooled_seconds": _POOLED,
        "itl_mean_per_request_seconds": Measure(
            "mean time between one chunk with tokens and the next, one value a request", mean_gap),
        "itl_max_per_request_seconds": Measure(
            "greatest time between one chunk with tokens and the next, one value a request: its worst stall",
            greatest_gap),
        "e2e_seconds": Measure("ended - intended, one value a request (response time)", e2e_from_intended),
        "normalised_latency_seconds": Measure("(ended - intended) / n, one value a request", normalised_from_intended),
        "service_ttft_seconds": Measure("first - sent, one value a request (service time)", ttft_from_sent),
        "service_e2e_seconds": Measure("ended - sent, one value a request (service time)", e2e_from_sent),
    },
    window="from the first intended send time to the end of the last answer, the time of draining included",
    begin=lambda record: record.intended_at)

_FIRST_SEND = "from the first send to the end of the last answer, the time of draining included"
VLLM = Definitions(
    measures={
        "ttft_seconds": Measure("first - sent: the wait for the client's own cap on concurrency is not in it",
                                ttft_from_sent),
        "tpot_seconds": Measure("(E2E - TTFT) / (n - 1); none where n < 2", tpot),
        "itl_seconds": _POOLED,
        "e2e_seconds": Measure("last - sent", last_from_sent),
    },
    window=_FIRST_SEND, begin=sent)

GUIDELLM = Definitions(
    measures={
        "ttft_seconds": Measure("first - sent", ttft_from_sent),
        "tpot_seconds": Measure("(last - sent) / n: the first token's wait is in it", tpot_with_first),
        "itl_seconds": Measure("(last - first) / (n - 1), one value a request", tpot),
        "e2e_seconds": Measure("ended - sent", e2e_from_sent),
    },
    window=_FIRST_SEND, begin=sent)

AIPERF = Definitions(
    measures={
        "ttft_seconds": Measure("first - sent", ttft_from_sent),
        "itl_seconds": Measure("(E2E - TTFT) / (n - 1), one value a request: what others call TPOT", tpot),
        "icl_seconds": _POOLED,
        "e2e_seconds": Measure("last - sent", last_from_sent),
    },
    window=_FIRST_SEND, begin=sent)

DEFINITIONS: dict[str, Definitions] = {"ours": OURS, "vllm": VLLM, "guidellm": GUIDELLM, "aiperf": AIPERF}


def definitions_named(name: str) -> Definitions:
    if name not in DEFINITIONS:
        raise ConfigError(f"definitions={name!r} is unknown; choose from {sorted(DEFINITIONS)}")
    return DEFINITIONS[name]
