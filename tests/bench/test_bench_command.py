"""`paceline bench TARGET` as its users meet it, against real sockets and a real engine of a tiny model."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import self_test
from paceline.bench.arrivals import PROCESSES
from paceline.bench.bench_files import found_rate_text, read_records
from paceline.bench.bench_run import bisect
from paceline.bench.dialects import DIALECTS
from paceline.bench.measures import DEFINITIONS
from paceline.bench.metrics import CellFacts, summarise
from paceline.bench.request_file import read_requests
from paceline.bench.slo import LIMITED
from paceline.bench.workload import WORKLOADS
from paceline.cli import main
from tests.model import tiny

from .fake_server import FakeServer, Script, serving
from .test_targets import closed_port

ENGINE = ("--num-kv-blocks", "64", "--transport", "thread", "--isa", "numpy")
SHORT = ("--workload", "fixed", "--prompt-tokens", "6", "--output-tokens", "4")


def bench(*argv: str, capsys: Any) -> tuple[int, str, str]:
    """Status, standard output, standard error."""
    try:
        status = main(("bench", *argv))
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def facts_of(*argv: str, capsys: Any) -> dict[str, Any]:
    status, out, err = bench(*argv, "--json", capsys=capsys)
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(lambda body: Script(first_seconds=0.002, gap_seconds=0.001, cached_tokens=0)) as one:
        yield one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_hf(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def forget(server: FakeServer) -> None:
    server.seen.clear()


# ---- what comes out


def test_a_server_is_measured_at_each_concurrency_and_every_round(server: FakeServer, capsys: Any) -> None:
    facts = facts_of(server.url, *SHORT, "--requests", "5", "--concurrency", "1,2", "--repeats", "2", "--slo",
                     "ttft=10", capsys=capsys)
    assert [cell["cell"] for cell in facts["cells"]] == ["concurrency=1", "concurrency=2"]
    assert [[one["round"] for one in cell["repeats"]] for cell in facts["cells"]] == [[1, 2], [1, 2]]
    for cell in facts["cells"]:
        assert all(one["requests"]["ok"] == 5 and one["goodput"]["share"] == 1.0 for one in cell["repeats"])
        assert cell["over_repeats"]["tpot_seconds.p50"]["n"] == 2
    assert facts["target"]["protocol"] == "completions" and facts["load"]["name"] == "fixed"


def test_no_prompt_is_ever_sent_twice_though_every_cell_asks_the_same_lengths(server: FakeServer, capsys: Any) -> None:
    facts_of(server.url, "--output-tokens", "4", "--requests", "6", "--concurrency", "1,3", "--repeats", "2",
             capsys=capsys)
    prompts = [tuple(seen.body["prompt"]) for seen in server.asked]
    assert len(prompts) == 4 * 6 + 2 * (1 + 3) and len({prompt[:3] for prompt in prompts}) == len(prompts)


def test_the_same_salt_makes_the_same_prompts(server: FakeServer, capsys: Any) -> None:
    sent = []
    for _ in range(2):
        server.seen.clear()
        facts_of(server.url, *SHORT, "--requests", "3", "--concurrency", "1", "--salt", "again", capsys=capsys)
        sent.append([seen.body["prompt"] for seen in server.asked])
    assert sent[0] == sent[1]


def test_the_files_hold_every_token_s_time_and_any_figure_can_be_had_from_them_again(
        server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    facts = facts_of(server.url, *SHORT, "--requests", "5", "--concurrency", "1,2", "--output", str(tmp_path / "out"),
                     capsys=capsys)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == facts
    records = read_records(tmp_path / "out" / "records.jsonl")
    of_cell = [record for record in records if record.cell == "concurrency=2"]
    again = summarise(of_cell, CellFacts(name="concurrency=2"))
    assert again["tpot_seconds"] == facts["cells"][1]["repeats"][0]["tpot_seconds"]
    assert sum(record.is_warm_up for record in of_cell) == 2
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert [row["cell"] for row in rows] == ["concurrency=1", "concurrency=2"]
    assert float(rows[1]["tpot_seconds.p99"]) == again["tpot_seconds"]["p99"]


def test_the_table_says_what_its_figures_mean_and_what_to_doubt(server: FakeServer, capsys: Any) -> None:
    status, out, err = bench(server.url, *SHORT, "--requests", "3", "--concurrency", "1", "--definitions",
                             "vllm,guidellm", capsys=capsys)
    assert status == 0 and out.startswith(f"target: {server.url}/v1/completions (fake completions)\nload: fixed (")
    assert "response time" in out and "p99 of 3 requests" in out
    assert "in vllm's words, concurrency=1: ms p50 / p99: TTFT" in out and "cap on concurrency is not in it" in out
    assert "(last - sent) / n" in out
    assert "3 of 3 ended well" in err and "3 of 3" not in out


def test_the_requests_of_one_target_can_be_asked_of_another(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "requests.jsonl")
    facts_of(server.url, "--workload", "chat", "--think-seconds", "0", "--output-tokens", "5", "--requests",
             "5", "--concurrency", "2", "--save-requests", path, capsys=capsys)
    asked = {tuple(seen.body["prompt"]) for seen in server.asked}
    saved = read_requests(path)
    assert {one.prompt_token_ids for one in saved} <= asked
    server.seen.clear()
    facts_of(server.url, "--requests-file", path, "--no-salt", "--concurrency", "2", "--warm-up", "0", capsys=capsys)
    assert {tuple(seen.body["prompt"]) for seen in server.asked} == {one.prompt_token_ids for one in saved}
    server.seen.clear()
    facts_of(server.url, "--requests-file", path, "--concurrency", "2", capsys=capsys)    # salted: it may be cached
    assert not {tuple(seen.body["prompt"]) for seen in server.asked} & {one.prompt_token_ids for one in saved}


def test_arrivals_are_open_where_a_rate_is_given_and_recorded_where_the_load_is(
        server: FakeServer, capsys: Any) -> None:
    facts = facts_of(server.url, *SHORT, "--requests", "5", "--rate", "200,400", "--concurrency", "3", capsys=capsys)
    assert [cell["cell"] for cell in facts["cells"]] == ["rate=200,cap=3", "rate=400,cap=3"]
    assert facts["cells"][0]["repeats"][0]["arrivals"] == "Poisson, 200/s"
    facts = facts_of(server.url, "--workload", "azure-code", "--length-scale", "0.01", "--requests", "4",
                     "--time-scale", "0.001", capsys=capsys)
    assert facts["cells"][0]["repeats"][0]["arrivals"] == "as recorded, times x 0.001"
    assert "CC BY 4.0" in facts["load"]["attribution"]


def test_long_prompts_are_cut_to_the_context_and_counted(server: FakeServer, capsys: Any) -> None:
    facts = facts_of(server.url, "--workload", "fixed", "--prompt-tokens", "90..110", "--output-tokens", "10",
                     "--max-context", "110", "--requests", "8", "--concurrency", "8", capsys=capsys)
    assert 1 <= facts["load"]["prompts_cut_to_context"] <= 7
    assert max(len(seen.body["prompt"]) for seen in server.asked) == 100


def test_an_engine_of_this_package_is_measured_without_http(model: str, capsys: Any) -> None:
    facts = facts_of(model, *SHORT, "--requests", "6", "--concurrency", "1,3", "--preset", "tgi", *ENGINE,
                     capsys=capsys)
    one = facts["cells"][1]["repeats"][0]
    assert one["requests"]["ok"] == 6 and one["lengths"]["tokens_counted_by"] == {"token_ids": 6}
    assert one["cache_hit_rate"]["value"] == 0.0 and one["preemptions"]["value"] == 0
    assert facts["target"]["preset"] == "tgi" and facts["target"]["config"]["cache"]["num_kv_blocks"] == 64


@pytest.mark.parametrize("form", ["text", "messages"])
def test_an_engine_takes_words_as_well_as_ids(form: str, model: str, capsys: Any) -> None:
    facts = facts_of(model, *SHORT, "--requests", "2", "--prompts", form, *ENGINE, capsys=capsys)
    lengths = facts["cells"][0]["repeats"][0]["lengths"]
    assert lengths["prompt_achieved_mean"] > lengths["prompt_asked_mean"] == 6    # words of a small vocabulary's pieces


def test_an_engine_s_full_queue_refuses_and_the_refusals_are_told(model: str, capsys: Any) -> None:
    facts = facts_of(model, *SHORT, "--requests", "6", "--arrivals", "burst", "--warm-up", "0", "--max-queue", "2",
                     *ENGINE, capsys=capsys)
    told = facts["cells"][0]["repeats"][0]["requests"]
    assert (told["ok"], told["errors"]["refused"]["count"]) == (2, 4)


def test_a_request_beyond_the_engine_s_limit_is_told_before_anything_runs(
        model: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "long.jsonl").write_text('{"prompt_token_ids": [40], "num_output_tokens": 500}')
    status, out, err = bench(model, "--requests-file", str(tmp_path / "long.jsonl"), *ENGINE, capsys=capsys)
    assert (status, out) == (2, "") and "line-1: 509 tokens of prompt and output; the limit here is 128" in err


def test_shared_prefixes_hit_the_engine_s_cache_within_a_cell_only(model: str, capsys: Any) -> None:
    facts = facts_of(model, "--workload", "shared-prefix", "--prefix-tokens", "64", "--prompt-tokens", "8",
                     "--output-tokens", "2", "--fan-out", "4", "--requests", "4", "--concurrency", "1", "--repeats",
                     "2", "--warm-up", "0", *ENGINE, capsys=capsys)
    hits = [one["cache_hit_rate"]["value"] for one in facts["cells"][0]["repeats"]]
    assert hits == [3 * 64 / (4 * 72)] * 2    # the first of each round finds nothing


def test_the_client_can_tell_its_own_ceiling(server: FakeServer, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(self_test, "NUM_REQUESTS", 4)
    monkeypatch.setattr(self_test, "NUM_TOKENS", 7)
    status, out, _ = bench(server.url, *SHORT, "--requests", "1", "--self-test", capsys=capsys)
    assert status == 0 and re.search(r"client: reads at least [1-9]\d* tokens/s here", out)


# ---- the highest rate


@pytest.mark.parametrize(("capacity", "first"), [(7.0, 1.0), (7.0, 100.0), (0.9, 1.0)])
def test_bisection_finds_the_rate_at_which_limits_begin_to_break(capacity: float, first: float) -> None:
    async def probe(rate: float) -> dict[str, Any]:
        return {"goodput": {"share": 1.0 if rate <= capacity else 0.5}, "client": {"is_valid": True}}

    found = asyncio.run(bisect(probe, first, 0.9, 0.05))
    assert found["rate"] <= capacity < found["fails_at"] <= found["rate"] * 1.05 and len(found["probes"]) < 14


def test_a_target_that_keeps_its_limits_at_no_rate_is_told_so() -> None:
    async def probe(rate: float) -> dict[str, Any]:
        return {"goodput": {"share": 0.0}, "client": {"is_valid": True}}

    found = asyncio.run(bisect(probe, 1.0, 0.9, 0.05))
    assert found["rate"] is None and found["fails_at"] < 0.01


def test_the_command_searches_shows_its_probes_and_stops_those_that_are_lost(capsys: Any) -> None:
    with serving(lambda body: Script()) as quick:
        status, out, _ = bench(quick.url, *SHORT, "--requests", "40", "--find-rate", "40000", "--slo", "e2e=0.000001",
                               "--warm-up", "0", "--json", capsys=capsys)
    facts = json.loads(out)
    assert status == 0 and facts["found_rate"]["rate"] is None and "bisection" in facts["found_rate"]["definition"]
    assert "none was sustained; fails at" in found_rate_text(facts["found_rate"])
    last = facts["cells"][-1]["repeats"][0]
    assert last["is_stopped"] and last["not_sent"] > 0 and last["goodput"]["share"] == 0.0


# ---- what it needs, and what its page says


def test_without_aiohttp_every_other_command_works_and_bench_says_what_to_install(server: FakeServer) -> None:
    code = ("import sys; sys.modules['aiohttp'] = None; from paceline.cli import main; "
            f"sys.exit(main(['bench', '{server.url}']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "pip install aiohttp" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", [*WORKLOADS, *PROCESSES, *DEFINITIONS, *LIMITED, *DIALECTS, "INVALID"])
def test_the_page_tells_of_every_name(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    assert re.search(rf"\b{name}\b", page, re.I)


def test_the_page_tells_the_lengths_that_the_workloads_have() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    for name in ("uniform", "decode-heavy", "mixed", "prefill-heavy"):
        found = re.search(rf"\| `{name}` \| (\S+) \| (\S+) \|", page)
        assert found is not None and WORKLOADS[name].about == f"prompt {found[1]}, output {found[2]}"


# ---- what is refused, and what goes wrong


@pytest.mark.parametrize(("argv", "words"), [
    (("--workload", "storm"), "storm.*uniform"), (("--requests", "0"), "num_requests must be at least 1"),
    (("--concurrency", "0"), "concurrency"), (("--concurrency", "two"), "concurrency"),
    (("--rate", "1,1"), "rate='1,1'"), (("--arrivals", "rain"), "rain.*poisson"), (("--arrivals", "poisson"), "rate"),
    (("--slo", "speed=1"), "slo"), (("--slo", "chat:ttft=1"), "no request is of class 'chat'"),
    (("--definitions", "mine"), "definitions='mine'"), (("--repeats", "0"), "repeats"),
    (("--warm-up", "-1"), "warm_up"), (("--ramp-in", "-1"), "ramp_in"),
    (("--rate", "1", "--ramp-in", "1"), "ramp_in has no effect"),
    (("--find-rate", "1"), "needs slo"), (("--attainment", "0.5"), "attainment has no effect"),
    (("--requests-file", "/nowhere"), "/nowhere"), (("--no-salt",), "requests_file"), (("--preset", "vllm"), "preset"),
    (("--num-kv-blocks", "8"), "num_kv_blocks has no effect"), (("--protocol", "smoke"), "smoke"),
    (("--token-range", "9..3"), "token_range"), (("--turns", "3"), "turns has no effect on workload 'uniform'")])
def test_a_mistake_is_told_in_one_line_before_anything_is_sent(
        argv: tuple[str, ...], words: str, server: FakeServer, capsys: Any) -> None:


    status, out, err = bench(server.url, *argv, capsys=capsys)
    assert (status, out, len(err.splitlines())) == (2, "", 1) and re.search(words, err), err
    assert not server.seen


def test_flags_of_servers_are_refused_for_an_engine_and_all_flags_for_core(capsys: Any) -> None:
    assert bench("smollm2", "--protocol", "chat", capsys=capsys)[0] == 2
    status, _, err = bench("core", "--workload", "uniform", capsys=capsys)
    assert status == 2 and "workload has no effect on bench core" in err


@pytest.mark.parametrize("suffix", ["", "/v1/completions"])
def test_a_server_that_is_not_there_ends_the_run_with_its_url(suffix: str, capsys: Any) -> None:
    url = f"http://127.0.0.1:{closed_port()}{suffix}"
    status, out, err = bench(url, capsys=capsys)
    assert (status, out) == (1, "") and url.removesuffix(suffix) in err and len(err.splitlines()) == 1


def test_a_bad_line_of_a_file_or_a_trace_is_told_by_its_number(tmp_path: Path, server: FakeServer, capsys: Any) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "num_output_tokens": 1}\n{"prompt": 3}\n')
    assert "bad.jsonl:2: " in bench(server.url, "--requests-file", str(bad), capsys=capsys)[2]
    bad.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 5}\n')
    status, _, err = bench(server.url, "--workload", "mooncake", "--trace", str(bad), capsys=capsys)
    assert status == 2 and "bad.jsonl:2: " in err and not server.seen


def test_failed_requests_are_counted_by_kind_and_the_rest_is_kept(tmp_path: Path, capsys: Any) -> None:
    scripts = iter([Script(status=500, says="out of order"), Script(num_chunks=1, ends="drop"), Script(status=429),
                    *(Script() for _ in range(3))])

    def on(body: dict[str, Any]) -> Script:
        return next(scripts) if body["max_tokens"] == 4 else Script()

    with serving(on) as faulty:
        status, out, _ = bench(faulty.url, *SHORT, "--requests", "6", "--concurrency", "1", "--warm-up", "0",
                               "--output", str(tmp_path), capsys=capsys)
    assert status == 0 and "1 http_error, the first: HTTP 500: out of order" in out and "1 refused" in out
    assert sorted(record.status for record in read_records(tmp_path / "records.jsonl")) == [
        "dropped", "http_error", "ok", "ok", "ok", "refused"]


def test_a_cell_in_which_nothing_went_well_is_a_failed_run(tmp_path: Path, capsys: Any) -> None:
    with serving(lambda body: Script(status=500) if body["max_tokens"] == 4 else Script()) as faulty:
        status, out, _ = bench(faulty.url, *SHORT, "--requests", "2", "--concurrency", "1", "--output", str(tmp_path),
                               capsys=capsys)
    assert status == 1 and "2 http_error" in out and (tmp_path / "summary.json").exists()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, ctrl_c_interrupts: None) -> None:
    def on(body: dict[str, Any]) -> Script:
        held = body["max_tokens"] == 4 and len(server.asked) > 3
        return Script(num_chunks=1, ends="hold") if held else Script()

    server = FakeServer(on)
    command = [sys.executable, "-m", "paceline.cli", "bench", server.url, *SHORT, "--requests", "9", "--concurrency",
               "1", "--warm-up", "0", "--output", str(tmp_path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    server.until(lambda: len(server.asked) == 4 and bool(server.asked[3].chunk_times))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    server.stop()
    assert process.returncode == 130, err
    facts = json.loads(out)
    one = facts["cells"][0]["repeats"][0]
    assert facts["is_interrupted"] and (one["requests"]["ok"], one["not_sent"]) == (3, 5)
    assert [record.status for record in read_records(tmp_path / "records.jsonl")] == ["ok", "ok", "ok", "cut"]


def test_a_directory_that_cannot_be_written_or_has_results_is_told_before_the_load(
        server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = bench(server.url, "--output", str(tmp_path / "file" / "out"), capsys=capsys)
    assert status == 1 and "out: cannot be written" in err and not server.asked
    (tmp_path / "records.jsonl").write_text("kept")
    status, _, err = bench(server.url, "--output", str(tmp_path), capsys=capsys)
    assert status == 2 and "there already" in err and (tmp_path / "records.jsonl").read_text() == "kept"


def test_the_key_of_a_server_is_sent_and_not_written_down(server: FakeServer, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", "--api-key=opensesame"])
    status, out, err = bench(server.url, *SHORT, "--requests", "1", "--api-key", "opensesame", "--json", capsys=capsys)
    assert status == 0 and "opensesame" not in out + err
