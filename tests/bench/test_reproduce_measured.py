"""The claims that are measured: on an engine without a model here, so that what is tested is the measuring."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.reproduce import flat_decode, on_server, tgi_vs_vllm
from paceline.bench.reproduce.claims import Claim, Reproduction
from paceline.bench.reproduce.histogram import NUM_BINS, counted, histogram
from paceline.bench.reproduce.lab import Lab
from paceline.build import build_policies, build_scheduler
from paceline.clock import VirtualClock, WallClock
from paceline.config import EngineConfig
from paceline.engine.async_engine import ServedModel
from paceline.engine.core import EngineCore
from paceline.engine.events import EngineEvents
from paceline.engine.llm import LLM
from paceline.engine.replay import Journaled, Replay
from paceline.errors import ConfigError
from paceline.model.dummy import dummy_tokenizer
from paceline.sched.plan import KVLayout
from paceline.sched.setup import SchedulerSetup
from paceline.sim.sim_executor import SimExecutor
from tests.bench.fake_server import FakeServer


def make_llm(config: EngineConfig) -> LLM:
    """As build_llm, with nothing to compute."""
    num_blocks = config.cache.num_kv_blocks or 4096
    setup = SchedulerSetup(
        scheduler=config.scheduler, prefix_cache=config.cache.prefix_cache, num_blocks=num_blocks,
        block_size=config.cache.block_size, windows=(None,), max_model_len=config.model.max_model_len or 4096)
    executor = SimExecutor(KVLayout(num_blocks, 16, 0), VirtualClock())
    core = EngineCore(build_scheduler(setup), executor, WallClock(), EngineEvents(lambda listener, error: None))
    model = ServedModel(tokenizer=dummy_tokenizer(300), chat_template=None, max_model_len=setup.max_model_len,
                        eos_token_ids=frozenset(), fingerprint="none", reads_priority=False, vocab_size=300)
    return LLM(core, model, WallClock(), lambda: 7, lambda: None)


def named(found: Reproduction) -> dict[str, Claim]:
    return {claim.what: claim for claim in found.claims}


def test_every_batch_is_measured_over_as_many_steps_as_asked() -> None:
    found = flat_decode.reproduce(make_llm, "none", (1, 8, 32), num_steps=5)
    assert [(run["batch"], run["steps"], run["ttft_seconds"]["n"]) for run in found.runs] == [
        (1, 5, 1), (8, 5, 8), (32, 5, 32)]
    claims = named(found)
    steps = {run["batch"]: run["step_ms"] for run in found.runs}
    assert claims["step at batch 32"].ours == steps[32] and claims["step at batch 32"].published == 74.77
    assert claims["all streams, batch 32 over 1"].ours == pytest.approx(32 * steps[1] / steps[32])
    assert round(float(claims["all streams, batch 32 over 1"].published or 0), 1) == 26.7


def test_the_knee_is_where_the_flat_line_meets_the_rising_one() -> None:
    runs = [{"batch": batch, "step_ms": max(10.0, 0.5 * batch)} for batch in (1, 4, 16, 32, 64)]
    assert flat_decode.knee(runs) == 20
    assert flat_decode.knee([{"batch": batch, "step_ms": 10.0} for batch in (1, 32, 64)]) is None


def test_batches_without_1_have_nothing_to_be_held_to() -> None:
    with pytest.raises(ConfigError, match="1 is needed"):
        flat_decode.reproduce(make_llm, "none", (2, 4))


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Reproduction:
    """Both regimes in virtual time and in process, short of blocks."""
    plan = tgi_vs_vllm.Plan(num_requests=12, concurrency=(1, 6), num_kv_blocks=200)
    return tgi_vs_vllm.reproduce(Lab(build_scheduler, tmp_path_factory.mktemp("journals")), make_llm, plan)


def test_every_request_of_every_run_ends_with_all_its_tokens(found: Reproduction) -> None:
    assert len(found.runs) == 2 * 2 * 3    # concurrency, presets, places
    for run in found.runs:
        assert (run["requests"]["ok"], run["lengths"]["output_other_than_asked"]) == (12, 0)


def test_the_regimes_show_their_signatures(found: Reproduction) -> None:
    for place in (*tgi_vs_vllm.COSTS, "engine"):
        tgi, vllm = (next(run for run in found.runs if (run["place"], run["contestant"], run["concurrency"])
                          == (place, preset, 6)) for preset in tgi_vs_vllm.PRESETS)
        assert tgi["preemptions"] == 0 < vllm["preemptions"]
        assert tgi["refusals"]["num_kv_blocks"] > 0


def test_virtual_runs_are_schedule_and_measured_ones_hardware(found: Reproduction) -> None:
    kinds = {(claim.what.partition(" clients")[0].rpartition(",")[0], claim.kind) for claim in found.claims}
    assert kinds == {("virtual, two cores", "S"), ("virtual, flat card", "S"), ("engine", "H")}
    assert {claim.published for claim in found.claims} == {"+30 to +100", "+200 to +500"}


def test_one_client_meets_the_same_schedule_under_both_regimes(found: Reproduction) -> None:
    for claim in found.claims:
        if claim.kind == "S" and " 1 clients" in claim.what:
            assert claim.ours == pytest.approx(0, abs=1e-6)


def test_the_virtual_runs_replay(found: Reproduction) -> None:
    journals = [run["journal"] for run in found.runs if "journal" in run]
    assert len(journals) == 8
    for journal in journals[-2:]:
        assert Replay(Journaled.read(journal), build_scheduler, build_policies).run().difference is None


def test_servers_are_held_to_the_first_over_real_sockets() -> None:
    first, second = FakeServer(), FakeServer()
    try:
        plan = tgi_vs_vllm.Plan(num_requests=3, concurrency=(2,), model=None, servers=(first.url, second.url))
        found = tgi_vs_vllm.reproduce(Lab(build_scheduler), make_llm, plan, on_server=on_server.measure)
    finally:
        first.stop()
        second.stop()
    runs = [run for run in found.runs if run["place"] == "server"]
    assert [(run["contestant"], run["requests"]["ok"]) for run in runs] == [(first.url, 3), (second.url, 3)]
    claims = [claim for claim in found.claims if claim.what.startswith("server")]
    assert [claim.kind for claim in claims] == ["H", "H"]
    assert claims[0].what == f"server, 2 clients: requests a second of {second.url} above {first.url}"
    assert len(first.asked) == len(second.asked) == 4    # one to warm up


def test_a_histogram_counts_every_value_once() -> None:
    assert counted([0.0, 1.0, 1.0, 12.0], 12.0) == [1, 2, *[0] * (NUM_BINS - 3), 1]
    text = histogram({"one": [1.0, 1.0, 12.0], "other": []}, "s")
    assert text.splitlines()[2] == "      1.00 to     2.00 " + 40 * "#" + " 2"
    assert histogram({"none": []}, "s") == "no request ended: no histogram"
