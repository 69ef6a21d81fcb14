"""`paceline compare` as its users meet it: presets on a real engine of a tiny model, servers on real sockets, peers as
processes."""

from __future__ import annotations

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

from paceline.bench.comparison import Comparison, read_comparison
from paceline.bench.findings import find
from paceline.bench.report import DEFINITIONS
from paceline.cli import main
from tests.model import tiny

from .fake_server import FakeServer, Script, serving
from .page import Page
from .test_targets import closed_port

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("static", "vllm", "paceline")
SHORT = ("--workload", "uniform", "--prompt-tokens", "10..60", "--output-tokens", "5..30", "--requests", "10")
TINY_KV = ("--num-kv-blocks", "12")    # two or three requests: some wait, some yield


def compare(*argv: str, capsys: Any) -> tuple[int, str, str]:
    """Status, standard output, standard error."""
    try:
        status = main(("compare", *argv))
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_hf(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three presets at two loads in two rounds."""
    found = tmp_path_factory.mktemp("compare") / "out"
    assert main(("compare", "--model", model, "--preset", ",".join(PRESETS), *SHORT, *TINY_KV, "--concurrency", "2,5",
                 "--rounds", "2", "--output", str(found), "--title", "Three <schedules>")) == 0
    return found


@pytest.fixture(scope="module")
def seen(folder: Path) -> Comparison:
    return read_comparison(folder)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# --- the report

def test_the_report_tells_the_finding_first_then_set_up_figures_and_charts(page: Page) -> None:
    order = list(page.sections)
    assert order[:3] == ["finding", "setup", "figures"]
    charts = ["throughput", "latency_against_load", "latency_cumulative", "latency_histograms_5_clients",
              "slots_5_clients", "kv_memory_5_clients", "queue_5_clients", "schedule_cost"]
    assert order[3:3 + len(charts)] == charts, "the highest load; lower ones fold away after them"
    assert order[-1] == "definitions"


def test_the_report_needs_no_network_and_no_script(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert page.outside == [] and not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert "@import" not in text and "url(" not in text
    assert set(re.findall(r"https?://[^\s\"<]+", text)) == {"http://www.w3.org/2000/svg"}    # a name, not an address


def test_every_drawing_is_told_in_words(page: Page) -> None:
    assert len(page.drawings) > 30
    assert all(role == "img" and len(title) > 20 for role, title in page.drawings)


def test_every_figure_of_the_tables_is_defined(page: Page) -> None:
    for name, words in DEFINITIONS.items():
        assert name in page.sections["definitions"] and words in page.sections["definitions"]
    for word in ("ttft", "tpot", "e2e", "throughput", "p50, p99", "ratios", "cache hits", "valid"):
        assert word in DEFINITIONS


def test_the_set_up_says_what_it_takes_to_repeat_it(page: Page) -> None:
    for said in ("processor", "commit", "command", "seed", "salt", "closed loop", "uniform", "GB/s", "GFLOP/s",
                 "fingerprint", "prompt tokens"):
        assert said in page.sections["setup"], said


def test_each_contestant_at_each_load_has_its_row_and_each_cell_its_own(page: Page, seen: Comparison) -> None:
    for name in PRESETS:
        assert page.sections["figures"].count(name) == len(seen.loads)
        assert page.sections["cells"].count(name) == len(seen.loads) * 2


def test_the_finding_is_what_the_records_say(page: Page, seen: Comparison, folder: Path) -> None:
    """From the raw lines, by hand: tokens of requests that ended well, from the first wish to the last end."""
    def rate(name: str, number: int) -> float:
        lines = (folder / "records" / f"{name}-5_clients-round{number}.jsonl").read_text().splitlines()
        records = [one for one in map(json.loads, lines) if not one["is_warm_up"]]
        assert len(records) == 10 and all(one["status"] == "ok" for one in records)
        seconds = max(one["ended_at"] for one in records) - min(one["intended_at"] for one in records)
        return float(sum(one["output_tokens"] for one in records) / seconds)

    rates = {name: [rate(name, number) for number in (1, 2)] for name in PRESETS}
    winner = max(rates, key=lambda name: rates[name][0] * rates[name][1])
    said = find(seen).numbers
    assert said["winner"] == winner and said["value"] == pytest.approx((rates[winner][0] * rates[winner][1]) ** 0.5)
    for other, lead in said["leads"].items():
        product = rates[winner][0] / rates[other][0] * rates[winner][1] / rates[other][1]
        assert lead["ratio"] == pytest.approx(product ** 0.5)
    assert f"{winner} gave the most output tokens per second" in page.sections["finding"]
    assert "Its weakest condition" in page.sections["finding"] and "2 rounds" in page.sections["finding"]


def test_charts_over_time_come_from_the_journals(page: Page, seen: Comparison) -> None:
    views = {cell.contestant: cell.view for cell in seen.cells if cell.load == seen.loads[-1] and cell.round == 1}
    for name, view in views.items():
        assert view is not None and {span.kind for span in view.spans} >= {"prefill", "decode"}
        assert 0 < view.num_slots <= 5 and f"{name}: " in page.sections["slots_5_clients"]
        for sample in view.memory:
            assert all(share >= 0 for share in sample.kv.values()) and sum(sample.kv.values()) <= 1 + 1e-9
    static, vllm = views["static"], views["vllm"]
    assert static is not None and vllm is not None
    assert any(span.kind == "padding" for span in static.spans) and not any(
        span.kind == "padding" for span in vllm.spans)
    assert len(vllm.preempted_at) == vllm.counts["num_preemptions"] > 0, "so small a pool makes requests yield"
    assert not static.preempted_at


def test_a_slot_holds_one_request_at_a_time(seen: Comparison) -> None:
    for cell in seen.cells:
        assert cell.view is not None
        ends: dict[int, float] = {}
        for span in sorted(cell.view.spans, key=lambda one: (one.slot, one.start)):
            assert span.start >= ends.get(span.slot, 0.0) - 1e-9 and span.end >= span.start
            ends[span.slot] = span.end


# --- what was measured

def test_contestants_take_turns_and_meet_the_same_lengths_and_no_cached_words(seen: Comparison) -> None:
    order = [(cell.round, cell.load.value, cell.contestant) for cell in seen.cells]
    assert order == [(number, load, name) for number in (1, 2) for load in (2.0, 5.0)
                     for name in (PRESETS if number == 1 else PRESETS[::-1])]
    lengths = {tuple(sorted((record.request_id, record.prompt_tokens, record.output_tokens) for record in cell.records
                            if not record.is_warm_up)) for cell in seen.cells}
    assert len(lengths) == 1
    assert {cell.summary["cache_hit_rate"]["value"] for cell in seen.cells} == {0.0}


def test_the_data_beside_the_report_is_whole(folder: Path, seen: Comparison, capsys: Any) -> None:
    rows = list(csv.DictReader((folder / "summary.csv").open()))
    assert len(rows) == len(seen.cells) == 12 and {row["trouble"] for row in rows} == {""}
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["cells"]) == 12 and summary["finding"]["winner"] in PRESETS
    assert {one["contestant"] for one in summary["ratios"]["of"]} == {"vllm", "paceline"}
    assert len((folder / "requests.jsonl").read_text().splitlines()) == 10
    assert len(list((folder / "journals").iterdir())) == 12
    if pytest.importorskip("resvg_py"):
        assert {path.stem for path in (folder / "charts").iterdir()} >= {"ratios", "throughput", "slots_5_clients"}


def test_the_same_report_is_made_again_from_the_folder(folder: Path, capsys: Any) -> None:
    before = (folder / "report.html").read_text(encoding="utf-8")
    (folder / "report.html").unlink()
    status, out, _ = compare("--again", str(folder), "--title", "Three <schedules>", "--json", capsys=capsys)
    assert status == 0 and (folder / "report.html").read_text(encoding="utf-8") == before
    told = json.loads(out)
    assert told["folder"] == str(folder) and len(told["cells"]) == 12


def test_names_and_titles_are_text_and_no_markup(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Three &lt;schedules&gt;" in text and "Three <schedules>" not in text


# --- servers and peers

@pytest.fixture(scope="module")
def server() -> Any:
    metrics = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n"
    with serving(lambda body: Script(first_seconds=0.02, gap_seconds=0.002, cached_tokens=0), metrics=metrics) as one:
        yield one


def peers_file(tmp_path: Path, *moods: str) -> str:
    entries = [{"name": f"peer-{mood}", "command": f"{sys.executable} -m tests.bench.fake_peer {{port}} {mood}",
                "environment": {"PYTHONPATH": str(ROOT)}, "stop_seconds": 0.3} for mood in moods]
    path = tmp_path / "peers.yaml"
    path.write_text(json.dumps({"peers": entries}))    # JSON is YAML
    return str(path)


def test_a_preset_a_running_server_and_a_peer_are_measured_side_by_side(
        server: FakeServer, model: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    status, said, err = compare(
        "--preset", "paceline", "--model", model, "--url", f"fake={server.url}", "--peers",
        peers_file(tmp_path, "well"), *SHORT, "--concurrency", "3", "--rounds", "1", "--baseline", "fake", "--output",
        str(out), capsys=capsys)
    assert status == 0, err
    comparison = read_comparison(out)
    assert [(one.name, one.kind) for one in comparison.contestants] == [
        ("paceline", "preset"), ("fake", "url"), ("peer-well", "peer")]
    assert all(cell.summary["requests"]["ok"] == 10 for cell in comparison.cells)
    assert "over HTTP" in said and "One round" in said
    (fake,) = comparison.cells_of("fake", comparison.loads[0])
    assert fake.samples and fake.samples[0].waiting == 1 and fake.samples[0].kv == {"used": 0.5}
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert "in use, as its /metrics tell" in page.sections["kv_memory_3_clients"]
    assert "fake_peer" in page.sections["setup"] and (out / "logs" / "peer-well.log").exists()


def test_goodput_is_compared_where_limits_are_given(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    """The server takes 20 ms to the first token and 2 ms to each other: one limit is kept by all, one by none."""
    rates = {}
    for limits in ("ttft=10", "ttft=5ms"):
        out = tmp_path / limits
        status, said, err = compare("--url", f"fake={server.url}", *SHORT, "--concurrency", "2", "--rounds", "1",
                                    "--slo", limits, "--output", str(out), "--json", capsys=capsys)
        assert status == 0, err
        (cell,) = json.loads(said)["cells"]
        rates[limits] = cell["goodput"]["requests_per_second"]
        page = Page((out / "report.html").read_text(encoding="utf-8"))
        assert "Requests a second that kept every limit: TTFT" in page.sections["goodput"]
        assert "good requests/s" in page.sections["figures"] and (out / "charts" / "goodput.png").exists()
        (line,) = csv.DictReader((out / "summary.csv").open())
        assert float(line["good_requests_per_second"]) == rates[limits]
        before = (out / "report.html").read_bytes()
        assert compare("--again", str(out), capsys=capsys)[0] == 0
        assert (out / "report.html").read_bytes() == before
    assert rates["ttft=10"] == cell_rate(tmp_path / "ttft=10") and rates["ttft=5ms"] == 0


def cell_rate(folder: Path) -> float:
    (cell,) = read_comparison(folder).cells
    return float(cell.summary["throughput"]["requests_per_second"])


def test_open_arrivals_are_compared_by_rate(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    status, said, err = compare("--url", f"fake={server.url}", *SHORT, "--rate", "100,200", "--rounds", "1", "--output",
                                str(tmp_path / "out"), capsys=capsys)
    assert status == 0 and "At 200 requests/s fake gave the shortest median time to a whole answer" in said, err
    assert "closed loop" not in said


def test_a_peer_that_dies_in_between_leaves_the_others_measured(
        server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    status, said, err = compare(
        "--url", f"fake={server.url}", "--peers", peers_file(tmp_path, "dies-later"), *SHORT, "--warm-up", "0",
        "--concurrency", "1,2", "--rounds", "1", "--output", str(out), capsys=capsys)
    assert status == 0, err
    assert "peer-dies-later ended with status 9" in said and "out of memory" in said
    comparison = read_comparison(out)
    assert [cell.summary["requests"]["ok"] for cell in comparison.cells if cell.contestant == "fake"] == [10, 10]
    died, after = [cell for cell in comparison.cells if cell.contestant == "peer-dies-later"]
    assert died.summary["requests"]["ok"] == 2 and after.trouble is not None


def test_a_peer_that_cannot_start_ends_the_command_with_its_log(
        server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    status, said, err = compare("--url", f"fake={server.url}", "--peers", peers_file(tmp_path, "dies"), *SHORT,
                                "--output", str(tmp_path / "out"), capsys=capsys)
    assert (status, said) == (1, "") and "peer peer-dies ended with status 1" in err
    assert "cannot find the weights" in err


def test_a_server_that_is_not_there_is_told_before_anything_is_measured(
        server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    server.seen.clear()
    url = f"http://127.0.0.1:{closed_port()}"
    status, said, err = compare("--url", f"fake={server.url}", "--url", f"gone={url}", *SHORT, "--output",
                                str(tmp_path / "out"), capsys=capsys)
    assert (status, said) == (1, "") and url in err and not server.asked


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, ctrl_c_interrupts: None) -> None:
    def on(body: dict[str, Any]) -> Script:
        held = body["max_tokens"] != 3 and len(server.asked) > 13
        return Script(num_chunks=1, ends="hold") if held else Script(cached_tokens=0)

    server = FakeServer(on)
    command = [sys.executable, "-m", "paceline.cli", "compare", "--url", f"fake={server.url}", *SHORT, "--concurrency",
               "1", "--warm-up", "0", "--rounds", "3", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    server.until(lambda: len(server.asked) == 14 and bool(server.asked[13].chunk_times))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    server.stop()
    assert process.returncode == 130, err
    first, second = read_comparison(tmp_path / "out").cells
    assert (first.trouble, second.trouble) == (None, "interrupted")
    assert first.summary["requests"]["ok"] == 10 and second.summary["requests"]["ok"] == 3
    assert "ended early: 1 of 3 cells are whole" in out and (tmp_path / "out" / "report.html").exists()


# --- mistakes

@pytest.mark.parametrize(("argv", "said"), [
    ((), "compare needs contestants"),
    (("--preset", "static,nonsense"), "nonsense"),
    (("--preset", "static,,vllm"), "expected names with commas"),
    (("--preset", "static,static"), "two contestants are called 'static'"),
    (("--preset", "static", "--baseline", "vllm"), "baseline='vllm' is no contestant"),
    (("--preset", "static", "--rounds", "0"), "rounds must be at least 1"),
    (("--preset", "static", "--workload", "nonsense"), "workload='nonsense' is unknown"),
    (("--preset", "static", "--requests", "0"), "num_requests must be at least 1"),
    (("--preset", "static", "--concurrency", "0"), "concurrency='0'"),
    (("--preset", "static", "--watermark", "0.1"), "preset static: "),
    (("--url", "http://127.0.0.1:1"), "expected NAME=URL"),
    (("--url", "a=nonsense"), "no URL of a server"),
    (("--peers", "/no/such/file.yaml"), "cannot be read"),
    (("--preset", "static", "--output", "/dev/null"), "not an empty folder"),
    (("--again", "/no/such/folder"), "run.json: cannot be read"),
    (("--preset", "static", "--find-rate", "3"), "--find-rate"),
    (("--preset", "static", "--slo", "speed=3"), "slo: 'speed=3' is not WORD=SECONDS"),
    (("--preset", "static", "--rate", "1,2", "--concurrency", "4,8"), "takes one concurrency"),
])
def test_a_mistake_is_told_in_one_line_with_exit_status_2(argv: tuple[str, ...], said: str, capsys: Any) -> None:
    status, out, err = compare(*argv, capsys=capsys)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_folder_with_results_is_not_written_over(server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.json").write_text("{}")
    status, _, err = compare("--url", f"fake={server.url}", "--output", str(tmp_path), capsys=capsys)
    assert status == 2 and "not an empty folder" in err and (tmp_path / "run.json").read_text() == "{}"
    status, _, err = compare("--again", str(tmp_path), capsys=capsys)
    assert status == 2 and "not a comparison of this version" in err


def test_help_tells_every_flag_s_meaning(capsys: Any) -> None:
    status, out, _ = compare("--help", capsys=capsys)
    assert status == 0
    for flag in ("--preset", "--url", "--peers", "--workload", "--requests", "--concurrency", "--rate", "--rounds",
                 "--num-kv-blocks", "--output", "--json", "--baseline", "--again", "--slo"):
        assert flag in out
