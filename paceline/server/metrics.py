"""Prometheus metrics under the names that vLLM's dashboards read. Fed by the engine's Outputs alone.

Definitions where the name leaves room: prompt_tokens counts a prompt once, when its first token comes, cached tokens
included, however many choices share it. inter_token_latency is the time between two deliveries to this process; all
other times are differences of the engine's own stamps, taken when the request ends. kv_cache_usage_perc (0..1) counts
blocks that running requests hold; cached blocks nobody holds are free. Aborted requests count in request_success with
finished_reason "abort" and in no latency that they did not reach.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from ..clock import Clock
from ..engine.messages import EngineStats, Outputs, PolicyState, RequestOutput, RequestTimeline
from ..request import FinishReason
from .engine_port import EngineInfo
from .ledger_metrics import LedgerMetrics
from .schedule_metrics import ScheduleMetrics
from .tally import Tally

TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
SIZE_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS = (1, 8, *(1 << power for power in range(4, 15)))
LABELS = ("model_name", "engine")

GAUGES = {
    "num_requests_running": "Requests in the running batch",
    "num_requests_waiting": "Requests waiting to run",
    "kv_cache_usage_perc": "KV blocks held by requests, 0 to 1",
}
COUNTERS = {
    "num_preemptions": "Requests that had to give their blocks back",
    "prompt_tokens": "Prompt tokens of requests that reached their first token",
    "generation_tokens": "Tokens generated",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
}
STATS_COUNTERS = {
    "num_preemptions": "num_preemptions",
    "generation_tokens": "num_generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token", TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Between two deliveries of tokens to a request", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("First token to end, over the tokens after the first", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to end", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("Arrival to first scheduled", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("First scheduled to end", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("First scheduled to first token", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("First token to end", REQUEST_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a finished request", SIZE_BUCKETS),
    "request_generation_tokens": ("Tokens generated for a finished request", SIZE_BUCKETS),
    "iteration_tokens_total": ("Tokens of one engine step", STEP_BUCKETS),
}


class Progress(NamedTuple):
    """What was seen of a request that has not finished."""

    num_tokens: int
    last_at: float


class Metrics:
    """One registry, one model, one engine."""

    def __init__(
        self, model_name: str, clock: Clock, engine_info: EngineInfo, tenants: Collection[str] = ()
    ) -> None:
        """tenants: those that may be told by name; others come from the field `user`."""
        disable_created_metrics()
        self._clock = clock
        self._values = (model_name, "0")
        self._registry = registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, LABELS, registry=registry).labels(*self._values)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(*self._values)
            for name, text in COUNTERS.items()
        }
        labels = dict(zip(LABELS, self._values, strict=True))
        self._histograms = {name: Tally(f"vllm:{name}", text, buckets, labels)
                            for name, (text, buckets) in HISTOGRAMS.items()}
        for histogram in self._histograms.values():
            registry.register(histogram)
        ended = Counter("vllm:request_success", "Requests ended", (*LABELS, "finished_reason"), registry=registry)
        self._ended = {reason: ended.labels(*self._values, reason.value) for reason in FinishReason}
        self._refused = Counter("paceline:requests_refused", "Requests turned away before they were accepted, by what "
                                "said no", (*LABELS, "reason"), registry=registry)
        self._open_replies = Gauge("paceline:open_replies", "Answers being generated or written", LABELS,
                                   registry=registry).labels(*self._values)
        self._tasks = Gauge("paceline:event_loop_tasks", "Tasks of the server's event loop", LABELS,
                            registry=registry).labels(*self._values)
        self._ledger = LedgerMetrics(registry, labels, tenants)
        self._switches = Counter("paceline:policy_switches", "Switches of the policies on the running server",
                                 (*LABELS, "preset"), registry=registry)
        ProcessCollector(registry=registry)
        self._schedule = ScheduleMetrics(registry, LABELS, self._values)
        self._engine_info = dict(engine_info)
        self._stats: EngineStats | None = None           # the latest
        self._told: EngineStats | None = None            # those that gauges and counters show
        self._progress: dict[str, Progress] = {}

    def text(self, num_open_replies: int = 0, num_tasks: int = 0, policy: PolicyState | None = None) -> bytes:
        """All of it; what is given is looked up when somebody asks."""
        self._schedule.show(policy)
        self._tell_stats()
        self._open_replies.set(num_open_replies)
        self._tasks.set(num_tasks)
        return generate_latest(self._registry)

    def refused(self, reason: str) -> None:
        self._refused.labels(*self._values, reason).inc()

    def switched(self, preset: str | None) -> None:
        self._switches.labels(*self._values, preset or "none").inc()

    def on_outputs(self, outputs: Outputs) -> None:
        """The engine's listener."""
        self._stats = outputs.stats
        if outputs.step_num_tokens:
            self._histograms["iteration_tokens_total"].observe(outputs.step_num_tokens)
        if outputs.ledger is not None:
            self._ledger.take(outputs.ledger)
        now = self._clock.now()
        for output in outputs.outputs:
            self._take_output(output, now)

    def _tell_stats(self) -> None:
        """When somebody looks, not with every step: those are many."""
        last, stats = self._told, self._stats
        if stats is None:
            return
        if last is None:
            self._publish_cache_info(stats)
        self._told = stats
        self._gauges["num_requests_running"].set(stats.num_running)
        self._gauges["num_requests_waiting"].set(stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(1 - stats.num_free_blocks / max(stats.num_blocks, 1))
        for name, attribute in STATS_COUNTERS.items():
            before = 0 if last is None else getattr(last, attribute)
            self._counters[name].inc(getattr(stats, attribute) - before)
        self._schedule.take(stats)

    def _publish_cache_info(self, stats: EngineStats) -> None:
        """Facts as labels of a gauge that is always 1, known with the first step."""
        info = {"num_gpu_blocks": str(stats.num_blocks)} | self._engine_info
        names = (*LABELS, *info)
        gauge = Gauge("vllm:cache_config_info", "The KV cache's configuration", names, registry=self._registry)
        gauge.labels(*self._values, *info.values()).set(1)

    def _take_output(self, output: RequestOutput, now: float) -> None:
        progress = self._progress.get(output.request_id)
        if output.token_ids:
            if progress is None:
                progress = Progress(0, now)
                if output.choice_index == 0:
                    self._counters["prompt_tokens"].inc(output.num_prompt_tokens)
            else:
                self._histograms["inter_token_latency_seconds"].observe(now - progress.last_at)
            progress = Progress(progress.num_tokens + len(output.token_ids), now)
            self._progress[output.request_id] = progress
        if output.finish_reason is not None:
            self._progress.pop(output.request_id, None)
            self._take_end(output, 0 if progress is None else progress.num_tokens)

    def _take_end(self, output: RequestOutput, num_tokens: int) -> None:
        assert output.finish_reason is not None
        self._ended[output.finish_reason].inc()
        self._histograms["request_prompt_tokens"].observe(output.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(num_tokens)
        if output.timeline is not None:
            for name, seconds in durations(output.timeline, num_tokens).items():
                self._histograms[name].observe(seconds)


def durations(timeline: RequestTimeline, num_tokens: int) -> dict[str, float]:
    """The phases that a request reached, in seconds."""
    end, start, first = timeline.finished_at, timeline.first_scheduled_at, timeline.first_token_at
    phases = {"e2e_request_latency_seconds": end - timeline.arrived_at}
    if start is not None:
        phases["request_queue_time_seconds"] = start - timeline.arrived_at
        phases["request_inference_time_seconds"] = end - start
    if start is not None and first is not None:
        phases["time_to_first_token_seconds"] = first - timeline.arrived_at
        phases["request_prefill_time_seconds"] = first - start
        phases["request_decode_time_seconds"] = end - first
        if num_tokens > 1:
            phases["request_time_per_output_token_seconds"] = (end - first) / (num_tokens - 1)
    return phases
