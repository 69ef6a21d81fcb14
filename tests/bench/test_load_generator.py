"""The load generator in virtual time: what is asked when, and what is written down, exact to a nanosecond."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.bench.arrivals import Arrivals
from paceline.bench.load_generator import CellPlan, Run, run_cell, threads_of
from paceline.bench.metrics import summarise
from paceline.bench.records import Asked
from paceline.bench.slo import slo_table
from paceline.errors import ConfigError

from .virtual_loop import ScriptedTarget, measured, run_virtually


def exactly(value: Any) -> Any:
    return pytest.approx(value, abs=1e-9)


def ask(number: int, num_output: int = 4, **fields: Any) -> Asked:
    return Asked(request_id=f"r{number}", num_output_tokens=num_output, num_prompt_tokens=2, prompt_token_ids=(1, 2),
                 **fields)


def asks(count: int, **fields: Any) -> list[Asked]:
    return [ask(number, **fields) for number in range(count)]


def at_rate(rate: float, cap: int | None = None) -> CellPlan:
    return CellPlan(name="c", arrivals=Arrivals(kind="constant", rate=rate), concurrency=cap)


def clients(count: int, **fields: Any) -> CellPlan:
    return CellPlan(name="c", concurrency=count, **({"ramp_in_seconds": 0.0} | fields))


# ---- times


def test_known_delays_come_back_as_ttft_itl_tpot_and_e2e() -> None:
    result, _ = measured(asks(20), clients(4), first_seconds=0.123, gap_seconds=0.017)
    facts = summarise(result.records, result.facts())
    for name, seconds in (("ttft_seconds", 0.123), ("itl_pooled_seconds", 0.017), ("tpot_seconds", 0.017),
                          ("itl_max_per_request_seconds", 0.017), ("e2e_seconds", 0.174),
                          ("normalised_latency_seconds", 0.174 / 4)):
        assert [facts[name][key] for key in ("p50", "p90", "p95", "p99", "max", "mean")] == exactly([seconds] * 6), name
    assert facts["throughput"]["window_seconds"] == exactly(5 * 0.174)
    assert facts["throughput"]["output_tokens_per_second"] == exactly(80 / (5 * 0.174))
    assert facts["client"]["is_valid"] and facts["client"]["schedule_delay_seconds"]["max"] == exactly(0.0)


def test_the_clock_starts_when_a_request_was_wanted_although_the_cap_let_it_go_later() -> None:
    """Ten a second, one at a time, half a second each: a client that starts its clock at the send reports 500 ms."""
    count = 20
    result, _ = measured(asks(count, num_output=1), at_rate(10.0, cap=1), first_seconds=0.5, gap_seconds=0.0)
    facts = summarise(result.records, result.facts())
    response = [0.5 * (number + 1) - 0.1 * number for number in range(count)]
    assert [facts["service_e2e_seconds"][key] for key in ("p50", "max")] == exactly([0.5, 0.5])
    assert facts["e2e_seconds"]["mean"] == exactly(sum(response) / count)
    assert facts["ttft_seconds"]["max"] == exactly(response[-1])
    vllm = summarise(result.records, result.facts(definitions="vllm"))
    assert vllm["ttft_seconds"]["max"] == exactly(0.5)
    assert facts["client"]["is_valid"]    # the cap is the load's wish: the client was never late


def test_goodput_counts_the_requests_that_kept_their_limits_from_the_wanted_time() -> None:
    """Two arrive each second at a server of one slot and 0.75 s: the wait grows by a quarter second with each."""
    result, _ = measured(asks(8, num_output=1), at_rate(2.0), first_seconds=0.75, gap_seconds=0.0, slots=1)
    assert [record.token_times[0] - record.intended_at for record in result.records] == exactly(
        [0.75 + 0.25 * number for number in range(8)])
    goodput = summarise(result.records, result.facts(slo_table(["ttft=1.3"])))["goodput"]
    assert (goodput["met"], goodput["share"], goodput["missed_by"]) == (3, 3 / 8, {"ttft": 5})
    assert goodput["requests_per_second"] == exactly(3 / 6.0)


def test_an_open_loop_sends_when_it_said_whatever_the_server_does() -> None:
    _, target = measured(asks(50, num_output=2), at_rate(4.0), first_seconds=3.0, gap_seconds=1.0, slots=1)
    assert [at for _, at in target.sent] == exactly([number / 4 for number in range(50)])


def test_a_closed_loop_keeps_so_many_under_way_and_a_client_goes_on_when_its_answer_ended() -> None:
    requests = [ask(number, num_output=1 + number % 3) for number in range(9)]
    result, target = measured(requests, clients(2), first_seconds=1.0, gap_seconds=1.0)
    assert [at for _, at in target.sent] == exactly([0, 0, 1, 2, 3, 4, 5, 6, 7])
    assert all(record.sent_at == exactly(record.intended_at) for record in result.records)


def test_recorded_arrivals_come_at_their_times_and_scale() -> None:
    requests = [ask(number, arrival_seconds=at) for number, at in enumerate((0.0, 0.4, 5.0))]
    plan = CellPlan(name="c", arrivals=Arrivals(kind="trace", time_scale=2.0))
    _, target = measured(requests, plan, first_seconds=0.1, gap_seconds=0.0)
    assert [at for _, at in target.sent] == exactly([0.0, 0.8, 10.0])


# ---- who waits for whom


@pytest.mark.parametrize("plan", [clients(1), at_rate(1.0)])
def test_a_turn_is_sent_when_the_one_before_has_ended_and_the_thinking_is_over(plan: CellPlan) -> None:
    talk = [ask(0), ask(1, after=("r0",), think_seconds=2.0), ask(2, after=("r1",), think_seconds=0.5)]
    result, target = measured(talk, plan, first_seconds=1.0, gap_seconds=0.5)
    assert dict(target.sent) == exactly({"r0": 0.0, "r1": 4.5, "r2": 7.5})
    assert [record.token_times[0] - record.intended_at for record in result.records] == exactly([1.0, 1.0, 1.0])


def test_a_client_of_a_closed_loop_holds_a_whole_conversation() -> None:
    talks = [ask(0), ask(1, after=("r0",), think_seconds=2.0), ask(2), ask(3, after=("r2",), think_seconds=2.0)]
    _, target = measured(talks, clients(1), first_seconds=1.0, gap_seconds=0.0)
    assert dict(target.sent) == exactly({"r0": 0, "r1": 3, "r2": 4, "r3": 7})


def test_a_request_that_follows_two_waits_for_both() -> None:
    join = [ask(0, num_output=1), ask(1, num_output=3), ask(2, after=("r0", "r1"))]
    _, target = measured(join, clients(1), first_seconds=1.0, gap_seconds=1.0)
    assert dict(target.sent) == exactly({"r0": 0.0, "r1": 0.0, "r2": 3.0})
    assert [len(thread) for thread in threads_of(join)] == [3]


def test_what_follows_a_failure_is_not_sent_and_says_why() -> None:
    class Refusing(ScriptedTarget):
        async def send(self, prepared: Asked, call: Any) -> None:
            if prepared.request_id == "r0":
                call.sent_at = call.clock()
                return call.fail("refused", "full")
            await super().send(prepared, call)

    talk = [ask(0), ask(1, after=("r0",)), ask(2, after=("r1",)), ask(3)]
    result = run_virtually(_run(Refusing(1.0, 0.0), talk, clients(1)))
    assert [(record.request_id, record.status) for record in result.records] == [
        ("r0", "refused"), ("r1", "cut"), ("r2", "cut"), ("r3", "ok")]
    assert "follows (r0) failed" in (result.records[1].error or "")


async def _run(target: ScriptedTarget, requests: list[Asked], plan: CellPlan) -> Any:
    return await run_cell(target, requests, plan, clock=asyncio.get_running_loop().time)


@pytest.mark.parametrize("after", [("r1",), ("nobody",)])
def test_nobody_can_follow_what_does_not_come_before(after: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="does not come before"):
        threads_of([ask(0, after=after), ask(1)])


# ---- warm-up, interruption, a late client


def test_the_warm_up_is_awaited_marked_and_enters_no_figure() -> None:
    warm = [ask(number) for number in range(100, 103)]
    result, target = measured(asks(2), clients(2, warm_up=warm), first_seconds=1.0, gap_seconds=0.0)
    assert [name for name, _ in target.sent] == ["r100", "r101", "r102", "r0", "r1"]
    facts = summarise(result.records, result.facts())
    assert facts["requests"]["warm_up_excluded"] == 3 and facts["requests"]["measured"] == 2
    assert facts["throughput"]["window_seconds"] == exactly(1.0)


def test_an_interrupted_cell_gives_back_what_it_has() -> None:
    async def run() -> Any:
        target = ScriptedTarget(1.0, 1.0)
        task = asyncio.ensure_future(_run(target, asks(9, num_output=3), clients(2)))
        asyncio.get_running_loop().call_later(4.5, task.cancel)
        return await task

    result = run_virtually(run())
    assert result.is_interrupted and result.num_not_sent == 5
    assert [record.status for record in result.records] == ["ok", "ok", "cut", "cut"]
    assert result.records[2].token_times == exactly((4.0,)) and "after 1 chunks" in (result.records[2].error or "")
    facts = summarise(result.records, result.facts())
    assert facts["requests"]["ok"] == 2 and facts["requests"]["errors"]["cut"]["count"] == 2


def test_a_client_that_sends_late_says_so_and_its_cell_is_invalid() -> None:
    class Busy(ScriptedTarget):
        """Its client has to do with other things before each send, as one whose processor is taken."""

        async def send(self, prepared: Asked, call: Any) -> None:
            await asyncio.sleep(0.02)
            await super().send(prepared, call)

    result = run_virtually(_run(Busy(1.0, 0.0), asks(10), clients(2)))
    client = summarise(result.records, result.facts())["client"]
    assert client["schedule_delay_seconds"]["p50"] == exactly(0.02) and not client["is_valid"]
    assert client["bound_seconds"] == exactly(0.01) and "INVALID" in client["verdict"]


def test_the_watcher_sees_every_end() -> None:
    seen: list[tuple[int, int]] = []

    def watch(run: Run) -> None:
        seen.append((len(run.records), run.num_under_way))

    measured(asks(4), clients(2), watch, first_seconds=1.0, gap_seconds=0.0)
    assert [count for count, _ in seen] == [1, 2, 3, 4] and all(under_way <= 2 for _, under_way in seen)


def test_a_watcher_that_has_seen_enough_stops_the_cell() -> None:
    def watch(run: Run) -> None:
        if len(run.records) == 3:
            run.stop()

    result, _ = measured(asks(9), clients(2), watch, first_seconds=1.0, gap_seconds=0.0)
    assert result.is_stopped and not result.is_interrupted and result.num_not_sent == 3
    assert [record.status for record in result.records] == ["ok", "ok", "ok", "ok", "cut", "cut"]
    assert [record.ended_at for record in result.records] == exactly([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(("ramp_in", "starts"), [(None, [0.0, 0.001, 0.002]), (6.0, [0.0, 2.0, 4.0])])
def test_the_clients_of_a_closed_loop_do_not_start_as_one(ramp_in: float | None, starts: list[float]) -> None:
    result, target = measured(asks(3), clients(3, ramp_in_seconds=ramp_in), first_seconds=9.0, gap_seconds=0.0)
    assert [at for _, at in target.sent] == exactly(starts)
    assert [record.intended_at for record in result.records] == exactly(starts)


@pytest.mark.parametrize("plan", [
    {"concurrency": 0}, {}, {"concurrency": 1, "ramp_in_seconds": -1.0},
    {"arrivals": Arrivals(kind="burst"), "ramp_in_seconds": 1.0}])
def test_a_cell_that_means_nothing_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"concurrency|ramp_in"):
        CellPlan(name="c", **plan)


def test_two_requests_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'r0'"):
        measured([ask(0), ask(0)], clients(1), first_seconds=1.0, gap_seconds=0.0)
