"""The client against a server of known delays, faults and manners, over real sockets."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import targets
from paceline.bench.arrivals import Arrivals
from paceline.bench.call import Call
from paceline.bench.event_stream import EventReader
from paceline.bench.load_generator import CellPlan, CellResult, run_cell
from paceline.bench.metrics import summarise
from paceline.bench.records import Asked, RequestRecord
from paceline.bench.slo import slo_table
from paceline.bench.targets import HttpOptions, HttpTarget, counters_in, split_url
from paceline.errors import ConfigError, EngineError

from .fake_server import EXTENSIONS, FakeServer, Script, serving

MILLISECOND = 0.001


def ask(number: int, num_output: int = 5, **prompt: Any) -> Asked:
    given = prompt or {"prompt_token_ids": (1, 2, number)}
    return Asked(request_id=f"r{number}", num_output_tokens=num_output, num_prompt_tokens=3, **given)


def load(url: str, requests: Sequence[Asked], concurrency: int = 4, plan: CellPlan | None = None, **options: Any
         ) -> CellResult:
    async def run() -> CellResult:
        async with HttpTarget(url, HttpOptions(**options)) as target:
            return await run_cell(target, requests, plan or CellPlan(name="c", concurrency=concurrency))

    return asyncio.run(run())


def about(url: str, **options: Any) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with HttpTarget(url, HttpOptions(**options)) as target:
            return target.about()

    return asyncio.run(run())


def one(url: str, asked: Asked | None = None, **options: Any) -> RequestRecord:
    return load(url, [asked or ask(0)], **options).records[0]


# ---- times


@dataclass
class Watched:
    """A cell and its server's own log: both read one clock, so they can be laid side by side."""

    result: CellResult
    sent: list[np.ndarray]    # by request: when the server sent each chunk, on the cell's clock

    @property
    def lateness(self) -> np.ndarray:
        """Of every chunk: from being sent to being seen."""
        return np.concatenate([np.array(record.token_times) - sent for record, sent in self.pairs()])

    def pairs(self) -> list[tuple[RequestRecord, np.ndarray]]:
        return [(record, self.sent[int(record.request_id[1:])]) for record in self.result.records]


@pytest.fixture(scope="module")
def watched() -> Watched:
    """Sixteen arrivals, 20 ms apart, two of them under way at most, at a server that needs 40 to 70 ms for the first
    token and 5 ms for each other one."""
    def on(body: dict[str, Any]) -> Script:
        return Script(first_seconds=0.04 + 0.01 * (body["prompt"][2] % 4), gap_seconds=0.005)

    with serving(on) as server:
        plan = CellPlan(name="c", arrivals=Arrivals(kind="constant", rate=50.0), concurrency=2)
        result = load(server.url, [ask(number, 12) for number in range(16)], plan=plan)
        by_number = {seen.body["prompt"][2]: np.array(seen.chunk_times) - result.zero for seen in server.asked}
    return Watched(result, [by_number[number] for number in range(16)])


def test_the_client_sees_each_chunk_when_the_server_sends_it(watched: Watched) -> None:
    """Nothing is seen before it was sent, and what is seen soonest is seen within a millisecond: the client adds none
    of its own. Single chunks may be later on a machine that does other things; how late the latest was bounds the doubt
    in the tests below."""
    lateness = watched.lateness
    assert len(lateness) == 16 * 12 and lateness.min() >= 0 and lateness.min() < MILLISECOND


def test_requests_are_wanted_when_their_arrival_says_and_ttft_counts_from_then(watched: Watched) -> None:
    wanted = sorted(record.intended_at for record in watched.result.records)
    assert np.diff(wanted) == pytest.approx(1 / 50, abs=1e-9)
    latest = watched.lateness.max()
    for record, sent in watched.pairs():
        assert record.sent_at is not None and record.sent_at >= record.intended_at
        assert 0 <= record.token_times[0] - record.intended_at - (sent[0] - record.intended_at) <= latest
    # Two at a time of 95 ms or more, wanted every 20 ms: the last ones cannot be sent before 7 x 95 ms.
    assert max((record.sent_at or 0) - record.intended_at for record in watched.result.records) > 0.3


def test_figures_are_those_of_the_server_s_own_log(watched: Watched) -> None:
    facts, latest = summarise(watched.result.records, watched.result.facts()), watched.lateness.max()
    of_server = {
        "ttft_seconds": [sent[0] - record.intended_at for record, sent in watched.pairs()],
        "service_ttft_seconds": [sent[0] - (record.sent_at or 0) for record, sent in watched.pairs()],
        "tpot_seconds": [(sent[-1] - sent[0]) / 11 for sent in watched.sent],
        "itl_pooled_seconds": np.concatenate([np.diff(sent) for sent in watched.sent])}
    for name, values in of_server.items():
        for key, share in (("p50", 50), ("p95", 95)):
            assert facts[name][key] == pytest.approx(np.percentile(values, share), abs=latest), (name, key)
    assert facts["service_ttft_seconds"]["p50"] >= 0.04 and facts["requests"]["ok"] == 16


@pytest.mark.parametrize("limit", [0.05, 0.1, 0.2, 0.3, 0.4, 0.6])
def test_goodput_is_that_of_the_server_s_own_log(watched: Watched, limit: float) -> None:
    met = summarise(watched.result.records, watched.result.facts(slo_table([f"ttft={limit}"])))["goodput"]["met"]
    of_server = np.array([sent[0] - record.intended_at for record, sent in watched.pairs()])
    assert np.sum(of_server <= limit - watched.lateness.max()) <= met <= np.sum(of_server <= limit)


# ---- what a server takes


@pytest.mark.parametrize("missing", [(), ("continuous_usage_stats",), ("ignore_eos", "min_tokens"), EXTENSIONS])
def test_a_server_is_asked_only_for_what_it_takes(missing: tuple[str, ...]) -> None:
    takes = tuple(name for name in EXTENSIONS if name not in missing)
    with serving(takes=takes) as server:
        record = one(server.url, counts="chunk")
        body = server.asked[0].body
    assert record.status == "ok" and sum(record.token_counts) == 5
    assert not missing or not set(missing) & {*body, *(body.get("stream_options") or {})}
    assert ("ignore_eos" in body) == ("ignore_eos" in takes)


@pytest.mark.parametrize(("takes", "counted_by"), [
    (EXTENSIONS, "usage"), (("return_token_ids", "include_usage"), "token_ids"), (("include_usage",), "spread"),
    ((), "guess")])
def test_a_chunk_is_not_a_token_and_the_best_count_there_is_is_used(takes: tuple[str, ...], counted_by: str) -> None:
    with serving(lambda body: Script(tokens_per_chunk=3), takes=takes) as server:
        record = one(server.url, ask(0, 8), counts="chunk")
    assert record.counted_by == counted_by and len(record.token_times) == 3
    assert record.token_counts == {"usage": (3, 3, 2), "token_ids": (3, 3, 2), "spread": (2, 3, 3),
                                   "guess": (1, 1, 1)}[counted_by]
    assert record.output_tokens == (None if counted_by == "guess" else 8)


@pytest.mark.parametrize(("takes", "counted_by"), [
    (EXTENSIONS, "spread"), (("return_token_ids", "continuous_usage_stats"), "token_ids")])
def test_counts_in_every_chunk_are_asked_for_where_wanted_or_where_there_are_no_others(
        takes: tuple[str, ...], counted_by: str) -> None:
    with serving(lambda body: Script(tokens_per_chunk=3), takes=takes) as server:
        record = one(server.url, ask(0, 8))
        body = server.asked[0].body
    assert record.counted_by == counted_by
    assert ("return_token_ids" in body) == (counted_by == "token_ids")


def test_what_a_server_was_not_asked_for_is_not_told_as_refused() -> None:
    with serving() as server:
        assert about(server.url)["does_not_take"] == []


def test_as_many_chunks_as_the_usage_has_tokens_are_a_token_each() -> None:
    with serving(takes=("include_usage",)) as server:
        assert one(server.url, ask(0, 8)).counted_by == "events"


def test_token_ids_are_sent_where_they_are_taken_and_text_where_not() -> None:
    with serving() as server:
        assert about(server.url)["prompt_forms"] == ["ids", "text"]
    with serving(takes_ids=False) as server:
        assert about(server.url)["prompt_forms"] == ["text"]
        assert one(server.url, ask(0, prompt="stone")).status == "ok"
        with pytest.raises(ConfigError, match=r"r0 is given as ids; .* takes text"):
            one(server.url)


def test_chats_are_asked_on_their_route() -> None:
    with serving() as server:
        record = one(server.url, ask(0, messages=({"role": "user", "content": "hi"},)), protocol="chat")
        assert record.status == "ok" and server.asked[0].path == "/v1/chat/completions"
        assert one(f"{server.url}/v1/chat/completions", ask(1, prompt="hi")).status == "ok"
        assert server.asked[1].body["messages"] == [{"role": "user", "content": "hi"}]


def test_tgi_is_found_and_spoken_to() -> None:
    with serving(is_tgi=True) as server:
        record = one(server.url, ask(0, prompt="stone"))
        body = server.asked[0].body
    assert (record.status, record.output_tokens, record.finish_reason) == ("ok", 5, "length")
    assert len(record.token_times) == 5 and body == {
        "inputs": "stone", "parameters": {"max_new_tokens": 5, "details": True}}


def test_each_request_has_a_connection_of_its_own_unless_asked_otherwise() -> None:
    with serving() as server:
        load(server.url, [ask(number) for number in range(5)], concurrency=1, keep_alive=True)
        assert len({seen.connection for seen in server.asked}) == 1
        server.seen.clear()
        assert about(server.url)["connections"] == "one a request"


def test_hits_and_preemptions_come_from_usage_or_from_the_server_s_counters() -> None:
    page = 'vllm:prefix_cache_hits_total{model_name="m"} 30.0\nvllm:prefix_cache_queries_total 1.2e+02\n'
    assert counters_in(page) == {"prefix_cache_hits": 30, "prefix_cache_queries": 120}
    with serving(lambda body: Script(cached_tokens=2), metrics=page) as server:
        result = load(server.url, [ask(0)])
        assert result.records[0].cached_tokens == 2
        assert result.grown == {"prefix_cache_hits": 0, "prefix_cache_queries": 0}


# ---- what can go wrong


@pytest.mark.parametrize(("script", "status", "words"), [
    (Script(status=500, says="out of order"), "http_error", "HTTP 500: out of order"),
    (Script(status=400, says="too long"), "http_error", "HTTP 400: too long"),
    (Script(status=429, says="full"), "refused", "HTTP 429: full"),
    (Script(status=503, says="draining"), "refused", "HTTP 503: draining"),
    (Script(num_chunks=2, ends="drop"), "dropped", "after 2 chunks"),
    (Script(num_chunks=2, ends="no-done"), "dropped", "broke off after 2 chunks"),
    (Script(num_chunks=2, ends="error"), "http_error", "the step failed"),
    (Script(num_chunks=1, ends="garbage"), "http_error", "cannot be read.*nonsense"),
    (Script(num_tokens=0), "dropped", "without a token"),
    (Script(finish_reason="abort"), "dropped", "ended it with 'abort'")])
def test_a_failed_request_is_told_by_kind_and_words_and_keeps_what_came(
        script: Script, status: str, words: str) -> None:
    def on(body: dict[str, Any]) -> Script:
        return script if body["prompt"] == [1, 2, 1] else Script()

    with serving(on) as server:
        good, bad, after = load(server.url, [ask(0), ask(1), ask(2)], concurrency=1).records
    assert (good.status, after.status) == ("ok", "ok")
    assert bad.status == status and bad.error is not None
    assert len(bad.token_times) == (script.num_chunks if script.num_chunks is not None else 5 * (
        script.status == 200 and script.num_tokens is None))
    assert re.search(words, bad.error), bad.error


def test_a_whole_answer_counts_though_its_connection_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CLOSING_SECONDS", 0.05)
    with serving(lambda body: Script(ends="open")) as server:
        records = load(server.url, [ask(0), ask(1)], concurrency=1).records
    assert [record.status for record in records] == ["ok", "ok"]


def test_an_answer_that_takes_too_long_is_a_timeout() -> None:
    def on(body: dict[str, Any]) -> Script:
        return Script(num_chunks=1, ends="hold") if body["max_tokens"] == 5 else Script()

    with serving(on) as server:
        record = one(server.url, timeout_seconds=0.3)
    assert record.status == "timeout" and len(record.token_times) == 1


def test_a_server_that_goes_away_leaves_unreachable_and_dropped_requests_and_the_results_before() -> None:
    server = FakeServer(lambda body: Script(num_chunks=1, ends="hold") if body.get("prompt") == [1, 2, 1] else Script())

    async def run() -> CellResult:
        async with HttpTarget(server.url, HttpOptions()) as target:
            plan = CellPlan(name="c", concurrency=1)
            task = asyncio.ensure_future(run_cell(target, [ask(0), ask(1), ask(2)], plan))
            await asyncio.to_thread(server.until, lambda: len(server.asked) == 2 and bool(server.asked[1].chunk_times))
            await asyncio.to_thread(server.stop)
            return await task

    records = asyncio.run(run()).records
    assert [record.status for record in records] == ["ok", "dropped", "unreachable"]
    assert server.url in (records[2].error or "")


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_server_that_is_not_there_is_told_with_its_url() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    for target in (url, f"{url}/v1/completions"):
        with pytest.raises(EngineError, match=url):
            about(target, model="m")


def test_a_server_of_another_kind_is_told_so() -> None:
    with serving(is_tgi=True) as server:
        with pytest.raises(EngineError, match="no list of models"):
            about(f"{server.url}/v1/completions")
    with serving(streams=False) as server:
        with pytest.raises(EngineError, match="no event stream but application/json"):
            about(server.url)
    with serving(lambda body: Script(status=401, says="who are you?")) as server:
        with pytest.raises(EngineError, match="who are you"):
            about(server.url)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        HttpTarget(url, HttpOptions())


def test_a_url_may_be_a_server_or_a_route() -> None:
    assert split_url("http://a:1/") == split_url("http://a:1/v1") == ("http://a:1", "http://a:1/v1", None)
    assert split_url("http://a:1/v1/chat/completions") == ("http://a:1", "http://a:1/v1", "chat")
    assert split_url("http://a:1/v3/completions") == ("http://a:1", "http://a:1/v3", "completions")
    assert split_url("https://a/x/completions") == ("https://a/x", "https://a/x", "completions")
    assert split_url("https://a/x/generate_stream")[::2] == ("https://a/x", "tgi")
    with pytest.raises(ConfigError, match="does not go with"):
        HttpTarget("http://a/generate_stream", HttpOptions(protocol="chat"))


# ---- events


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(0, 99), max_size=3), max_size=6), st.data())
def test_events_come_whole_however_their_bytes_are_cut(values: list[dict[str, int]], data: st.DataObject) -> None:
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    told = b"".join(b": comment" + newline + b"data: " + orjson.dumps(value) + newline * 2 for value in values)
    reader, found = EventReader(), []
    while told:
        cut = data.draw(st.integers(1, max(1, len(told))))
        found += reader.feed(told[:cut])
        told = told[cut:]
    assert [orjson.loads(event) for event in found + reader.finish()] == values


def test_a_stream_without_its_last_empty_line_still_gives_its_last_event() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\ndata:2\n\ndata: 3") == [b"1\n2"]
    assert reader.finish() == [b"3"]


@pytest.mark.parametrize("total", [0, 1, 5, 7, 100])
def test_tokens_spread_over_chunks_add_up(total: int) -> None:
    call = Call(clock=lambda: 0.0)
    for number in range(7):
        call.chunk(float(number), None)
    call.usage({"completion_tokens": total})
    record = call.record(ask(0), "c", False)
    assert sum(record.token_counts) == total and len(record.token_counts) == 7
