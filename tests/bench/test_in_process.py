"""scripts/bench_in_process.py: engines in processes of their own meet one closed loop, and leave a report behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.bench.comparison import read_comparison
from paceline.bench.workload import WorkloadSpec
from paceline.ops.cpu import load_kernels
from scripts.bench_in_process import Engine, InProcess
from tests.model import tiny

CHILD = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "in_process.py"), "paceline"]


@pytest.mark.skipif(load_kernels() is None, reason="the extension is not built")
def test_two_engines_meet_the_same_requests_and_no_more_clients_than_there_are(tmp_path: Path) -> None:
    model = str(tiny.write_hf(tmp_path / "model", arrays=tiny.hf_arrays()))
    spec = WorkloadSpec(name="uniform", num_requests=5, prompt_tokens="3..9", output_tokens="2..6", first_token_id=3,
                        end_token_id=40)
    folder = tmp_path / "run"
    InProcess(spec, 2, 2, folder).run({name: [*CHILD, model, "--max-model-len", "64", "--dtype", name]
                                       for name in ("int8", "bf16")})
    comparison = read_comparison(folder)
    assert [(cell.contestant, cell.round) for cell in comparison.cells] == [
        ("int8", 1), ("bf16", 1), ("bf16", 2), ("int8", 2)]
    for cell in comparison.cells:
        assert [record.status for record in cell.records] == ["ok"] * 5
        assert [record.output_tokens for record in cell.records] == [
            record.asked_output_tokens for record in cell.records]
        for record in cell.records:    # whoever was sent before it and had not ended yet, and itself
            assert record.sent_at is not None and record.token_times[0] > record.sent_at
            assert sum(other.sent_at <= record.sent_at < other.ended_at for other in cell.records) <= 2
    assert "int8" in (folder / "report.html").read_text()


def test_an_engine_that_does_not_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nobody ended: (?s:.)*no/such/model"):
        Engine("nobody", [*CHILD, "no/such/model.gguf"], tmp_path / "log")
