"""/metrics: names, labels and numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paceline.clock import VirtualClock
from paceline.engine.messages import EngineStats, Outputs, RequestOutput, RequestTimeline
from paceline.request import FinishReason
from paceline.sched.step_time import COEFFICIENTS, UNKNOWN, StepTime
from paceline.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, TOKEN_BUCKETS, TTFT_BUCKETS, Metrics
from paceline.server.tally import Tally

from .conftest import MODEL, StartServer

LABELS = {"model_name": MODEL, "engine": "0"}


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, other label's value) -> value; labels checked."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("process_"):
                continue    # of the process as a whole, under the names and without the labels that all exporters use
            assert sample.labels.items() >= LABELS.items(), sample
            rest = {name: value for name, value in sample.labels.items() if name not in LABELS}
            found[sample.name, ",".join(rest.values())] = sample.value
    return found


def stats(**changes: int) -> EngineStats:
    values = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    values |= {"num_blocks": 10, "num_free_blocks": 10, "step_time": UNKNOWN}
    return EngineStats(**(values | changes))


def output(request_id: str, num_tokens: int, reason: FinishReason | None = None, **more: object) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=(1,) * num_tokens, finish_reason=reason,
                         **{"choice_index": 0, "num_prompt_tokens": 7} | more)  # type: ignore[arg-type]


def test_every_name_is_there_from_the_start() -> None:
    text = Metrics(MODEL, VirtualClock(), {}).text().decode()
    found = {name for name, _ in samples(text)}
    assert {f"vllm:{name}" for name in GAUGES} <= found
    assert {f"vllm:{name}_total" for name in COUNTERS} <= found
    assert {f"vllm:{name}_count" for name in HISTOGRAMS} <= found
    assert not any(name.endswith("_created") for name in found)
    reasons = {rest for name, rest in samples(text) if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error", "timeout"}
    assert {"paceline:open_replies", "paceline:event_loop_tasks"} <= found and "\nprocess_open_fds " in text


def test_gauges_and_counters_follow_the_engines_stats() -> None:
    metrics = Metrics(MODEL, VirtualClock(), {"block_size": "16"})
    metrics.on_outputs(Outputs((), stats(num_running=3, num_waiting=2, num_free_blocks=4, num_preemptions=1)))
    metrics.on_outputs(Outputs((), stats(num_running=1, num_free_blocks=9, num_preemptions=4, prefix_cache_hits=32,
                                         prefix_cache_queries=48, num_generation_tokens=5), step_num_tokens=12))
    text = metrics.text().decode()
    found = samples(text)
    assert found["vllm:num_requests_running", ""] == 1 and found["vllm:num_requests_waiting", ""] == 0
    assert abs(found["vllm:kv_cache_usage_perc", ""] - 0.1) < 1e-9
    assert found["vllm:num_preemptions_total", ""] == 4
    assert found["vllm:prefix_cache_queries_total", ""] == 48 and found["vllm:prefix_cache_hits_total", ""] == 32
    assert found["vllm:generation_tokens_total", ""] == 5
    assert found["vllm:iteration_tokens_total_count", ""] == 1 and found["vllm:iteration_tokens_total_sum", ""] == 12
    assert 'vllm:cache_config_info{block_size="16",engine="0",model_name="fake-model",num_gpu_blocks="10"} 1.0' in text


def test_times_of_a_request() -> None:
    clock = VirtualClock()
    metrics = Metrics(MODEL, clock, {})
    metrics.on_outputs(Outputs((output("a", 1),), stats()))
    clock.advance(0.5)
    metrics.on_outputs(Outputs((output("a", 2),), stats()))
    timeline = RequestTimeline(arrived_at=0.0, first_scheduled_at=1.0, first_token_at=3.0, finished_at=9.0,
                               num_preemptions=0)
    metrics.on_outputs(Outputs((output("a", 1, FinishReason.STOP, timeline=timeline),), stats()))
    found = samples(metrics.text().decode())
    sums = {name: found[f"vllm:{name}_sum", ""] for name in HISTOGRAMS}
    counts = {name: found[f"vllm:{name}_count", ""] for name in HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 3, "inter_token_latency_seconds": 0.5,
        "request_time_per_output_token_seconds": 2, "e2e_request_latency_seconds": 9, "request_queue_time_seconds": 1,
        "request_inference_time_seconds": 8, "request_prefill_time_seconds": 2, "request_decode_time_seconds": 6,
        "request_prompt_tokens": 7, "request_generation_tokens": 4, "iteration_tokens_total": 0}
    assert counts["inter_token_latency_seconds"] == 2 and counts["iteration_tokens_total"] == 0
    assert found["vllm:request_success_total", "stop"] == 1


def test_a_request_that_never_ran_has_no_phases() -> None:
    metrics = Metrics(MODEL, VirtualClock(), {})
    timeline = RequestTimeline(arrived_at=1.0, first_scheduled_at=None, first_token_at=None, finished_at=2.0,
                               num_preemptions=0)
    metrics.on_outputs(Outputs((output("a", 0, FinishReason.ABORT, timeline=timeline),), stats()))
    found = samples(metrics.text().decode())
    assert found["vllm:request_success_total", "abort"] == 1 and found["vllm:prompt_tokens_total", ""] == 0
    assert found["vllm:time_to_first_token_seconds_count", ""] == 0
    assert found["vllm:e2e_request_latency_seconds_sum", ""] == 1
    assert not metrics._progress


def test_the_buckets_are_those_dashboards_expect() -> None:
    found = samples(Metrics(MODEL, VirtualClock(), {}).text().decode())
    edges = [float(rest) for name, rest in found if name == "vllm:time_to_first_token_seconds_bucket"]
    assert edges == [*TTFT_BUCKETS, float("inf")]


def test_over_http_prompts_of_a_batch_add_up(start_server: StartServer) -> None:
    server = start_server()
    server.completion(prompt=["abc", "x" * 30], n=2, max_tokens=4)
    server.chat()
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(response.text)
    assert found["vllm:prompt_tokens_total", ""] == 33 + len("user: hi\nassistant: ")
    assert found["vllm:generation_tokens_total", ""] == 4 * 4 + 8
    assert found["vllm:request_success_total", "length"] == 5
    assert found["vllm:num_requests_running", ""] == 0
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 5


def test_idle_slots_and_the_step_time_model_are_exported() -> None:
    metrics = Metrics(MODEL, VirtualClock(), {})
    model = StepTime((0.004, 0.0006, 2e-7, 0.0004, 1e-7), relative_error=0.07, num_observations=9)
    for num_steps in (1, 3):
        metrics.on_outputs(Outputs((), stats(num_slot_steps=4 * num_steps, num_idle_slot_steps=num_steps,
                                             num_padding_rows=num_steps, step_time=model)))
    found = samples(metrics.text().decode())
    assert found["paceline:slot_steps_total", ""] == 12
    assert found["paceline:idle_slot_steps_total", ""] == found["paceline:padding_rows_total", ""] == 3
    assert found["paceline:step_time_relative_error", ""] == 0.07
    assert [found["paceline:step_time_seconds", term] for term in COEFFICIENTS] == list(model.coefficients)


@given(values=st.lists(st.one_of(st.floats(0, 100), st.sampled_from(TOKEN_BUCKETS)), max_size=40))
def test_a_tally_tells_what_the_clients_own_histogram_tells(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("vllm:inter_token_latency_seconds", "Between tokens", TOKEN_BUCKETS, LABELS)
    ours.register(tally)
    histogram = Histogram("vllm:inter_token_latency_seconds", "Between tokens", tuple(LABELS), buckets=TOKEN_BUCKETS,
                          registry=theirs).labels(*LABELS.values())
    for value in values:
        tally.observe(value)
        histogram.observe(value)
    told = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == told
