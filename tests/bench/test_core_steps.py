"""`paceline bench core` measures what it says: a scheduler kept at one size, busy with starts and ends."""

from __future__ import annotations

import json
from dataclasses import fields

from paceline.bench import core_steps
from paceline.bench.core_steps import Crowd, Timing
from paceline.build import build_scheduler
from paceline.cli import main
from paceline.config import SchedulerConfig


def test_the_crowd_keeps_its_size_while_requests_end_start_and_hit() -> None:
    crowd = Crowd(build_scheduler, SchedulerConfig(), num_running=12, num_waiting=30)
    for _ in range(2 * core_steps.OUTPUT_TOKENS):
        crowd.refill()
        crowd.step()
    crowd.refill()
    stats = crowd.scheduler.stats()
    assert stats.num_running + stats.num_waiting == 12 + 30 and stats.num_running >= 10
    assert stats.num_preemptions == 0
    assert 0.3 < stats.prefix_cache_hits / stats.prefix_cache_queries < 0.6
    assert len(crowd.add_seconds) > 42
    crowd.scheduler.check()


def test_the_command_prints_every_size(monkeypatch, capsys) -> None:
    monkeypatch.setattr(core_steps, "SIZES", ((1, 0), (4, 20)))
    assert main(("bench", "core", "--json", "--preset", "vllm")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["preset"] == "vllm" and "median" in facts["definition"]
    assert [(one["num_running"], one["num_waiting"]) for one in facts["sizes"]] == [(1, 0), (4, 20)]
    assert all(one["total_ms"] > 0 and set(one) == {field.name for field in fields(Timing)} for one in facts["sizes"])
    assert main(("bench", "core")) == 0
    assert len(capsys.readouterr().out.partition("\n\n")[0].splitlines()) == 3
