"""`--journal`, `paceline journal` and `paceline replay` as their users meet them, with the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.cli import main

PROMPTS = [f"{'The sea is wide. ' * (1 + index % 4)}Boat number {index}" for index in range(12)]


@pytest.fixture(scope="module")
def journal(tmp_path_factory) -> Path:
    """A starved run: preemptions, prefix hits, several choices."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    with LLM("smollm2", num_kv_blocks=16, max_num_batched_tokens=48, max_num_seqs=8, journal=str(path)) as llm:
        llm.generate(PROMPTS, n=2, max_tokens=30, temperature=1.0, ignore_eos=True, show_progress=False)
    return path


def run(*argv: str, capsys: Any) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_run_replays_to_the_same_plans(journal: Path, capsys) -> None:
    status, out, err = run("replay", str(journal), capsys=capsys)
    assert (status, err) == (0, "") and out.startswith("identical: ") and "of 12 requests" in out
    facts = json.loads(run("replay", str(journal), "--json", capsys=capsys)[1])
    assert facts == {"is_identical": True, "steps": facts["steps"], "requests": 12, "difference": None}


def test_a_journal_that_was_changed_is_exit_status_1_with_the_first_difference(
        journal: Path, tmp_path: Path, capsys) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"step_id":9,' in line)
    changed = tmp_path / "changed"
    lines[index] = lines[index].replace('"num_running":', '"num_running":1')
    changed.write_text("".join(lines))
    status, out, _ = run("replay", str(changed), capsys=capsys)
    assert status == 1 and f"line {index + 1}, step 9: plan.num_running: recorded 1" in out


def test_a_damaged_journal_is_one_line_and_status_1(journal: Path, tmp_path: Path, capsys) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"".join([*journal.read_bytes().splitlines(keepends=True)[:5], b"rubbish\n"]))
    for command in (("replay",), ("journal",), ("replay", "--max-num-seqs", "2")):
        status, out, err = run(command[0], str(damaged), *command[1:], capsys=capsys)
        assert (status, out, err.count("\n")) == (1, "", 1) and f"{damaged}, line 6: " in err


def test_the_journal_holds_no_prompt_and_no_answer(journal: Path, tmp_path: Path) -> None:
    assert b"sea" not in journal.read_bytes().lower()
    for has_tokens in (False, True):
        path = tmp_path / f"{has_tokens}"
        with LLM("smollm2", num_kv_blocks=20, journal=str(path), journal_tokens=has_tokens) as llm:
            (answer,) = llm.generate([PROMPTS[0]], max_tokens=12, temperature=0, show_progress=False)
            prompt = llm.model.tokenizer.encode(PROMPTS[0], add_special_tokens=True)
        content = path.read_text()
        for token_ids in (prompt, answer.token_ids[:1]):
            assert (json.dumps(list(token_ids), separators=(",", ":")) in content) is has_tokens


def test_an_older_journal_of_the_same_name_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("older\n")
    with LLM("smollm2", num_kv_blocks=20, journal=str(path)) as llm:
        llm.generate(["hi"], max_tokens=2, show_progress=False)
    assert (tmp_path / "journal.1").read_text() == "older\n"
    assert main(("replay", str(path))) == 0


# ---- the summary

def test_the_summary_counts_what_happened(journal: Path, capsys) -> None:
    facts = json.loads(run("journal", str(journal), "--json", capsys=capsys)[1])
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    victims = [victim for line in steps for victim in line["plan"].get("preempted", ())]
    assert facts["requests"]["requests"] == 12 and facts["requests"]["choices"] == 24
    assert facts["requests"]["unfinished"] == 0
    assert facts["steps"]["steps"] == len(steps)
    assert facts["preemptions"]["preemptions"] == len(victims) > 0
    assert facts["preemptions"]["lost_tokens"] == sum(victim["num_lost_tokens"] for victim in victims)
    assert facts["tokens"]["generated_tokens"] == sum(
        entry if isinstance(entry, int) else entry["num_tokens"] for line in steps for entry in line["result"]["rows"])
    assert facts["refusals"]["num_kv_blocks"].endswith("requests")
    assert 0 < facts["tokens"]["hit_rate"] < 1 and facts["waits"]["queue_seconds_p99"] > 0


@pytest.mark.parametrize("width", [20, 1000])
def test_the_chart_fits_its_width_and_shows_every_request(journal: Path, width: int, capsys) -> None:
    status, out, _ = run("journal", str(journal), "--width", str(width), "--rows", "30", capsys=capsys)
    chart = out.partition("\n\n")[2].splitlines()
    cells = [line.partition("llm-0-")[2].partition(" ")[2] for line in chart[1:]]
    assert status == 0 and "\x1b" not in out and len(chart) == 1 + 24
    assert all(0 < len(lane) <= width for lane in cells)
    assert any("×" in lane for lane in cells) and all("▒" in lane or "█" in lane for lane in cells)
    short = run("journal", str(journal), "--width", str(width), "--rows", "5", capsys=capsys)[1]
    assert short.rstrip().endswith("and 19 choices that arrived later (--rows)")


def test_an_output_without_unicode_gets_ascii(journal: Path) -> None:
    command = [sys.executable, "-m", "paceline.cli", "journal", str(journal)]
    ended = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, timeout=60)
    out = ended.stdout.decode("ascii")
    assert ended.returncode == 0 and "#=" in out and "x" in out.partition("\n\n")[2]


# ---- counterfactuals

def test_the_same_policies_by_rule_plan_what_was_planned_or_nearly(journal: Path, capsys) -> None:
    facts = json.loads(run("replay", str(journal), "--max-num-seqs", "8", "--json", capsys=capsys)[1])
    own, other = facts["columns"]["own_by_rule"], facts["columns"]["other_by_rule"]
    assert facts["is_counterfactual"] and facts["changed"] == {} and own == other
    recorded = facts["columns"]["journal"]
    for name in ("finished", "cut_short", "steps", "preemptions"):
        assert own[name] == recorded[name]


def test_a_roomier_pool_would_have_preempted_nobody(journal: Path, capsys) -> None:
    facts = json.loads(run("replay", str(journal), "--num-kv-blocks", "400", "--json", capsys=capsys)[1])
    assert facts["changed"] == {"num_kv_blocks": "16 -> 400"}
    assert facts["columns"]["journal"]["preemptions"] > 0 == facts["columns"]["other_by_rule"]["preemptions"]
    assert facts["columns"]["other_by_rule"]["finished"] == 24


def test_a_counterfactual_says_that_it_is_one(journal: Path, capsys) -> None:
    status, out, _ = run("replay", str(journal), "--preset", "vllm", "--max-num-seqs", "3", capsys=capsys)
    assert status == 0 and out.startswith("COUNTERFACTUAL, not measured")
    assert "max_num_seqs 8 -> 3" in out and "ttft seconds p99" in out
