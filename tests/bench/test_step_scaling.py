"""scripts/bench_step_scaling.py fits what it says it fits, and runs to its end on a small model."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.ops.cpu import load_kernels
from scripts import bench_step_scaling as scaling
from tests.model import tiny


def test_a_law_is_found_again_and_one_of_a_degree_more_claims_nothing(capsys: Any) -> None:
    rows = np.array([8.0, 16, 32, 64, 8, 16, 32, 64])
    keys = rows * np.repeat([64, 1024], 4)
    ms = 2.5 + 0.9 * rows + 0.0015 * keys
    found, off = scaling.least_squares([rows**0, rows, keys], ms)
    assert found == pytest.approx([2.5, 0.9, 0.0015]) and off < 1e-9
    scaling.fit("decode", {"": rows**0, "rows": rows, "keys": keys}, {"rows^2": rows**2}, ms)
    assert "0.9 rows + 0.0015 keys" in (told := capsys.readouterr().out)
    assert "+0.0% of the longest step" in told or "-0.0% of the longest step" in told


def test_what_grows_faster_shows_in_the_term_of_a_degree_more(capsys: Any) -> None:
    tokens = np.array([32.0, 64, 128, 256, 512])
    ms = 1 + 0.5 * tokens + 0.01 * tokens**2
    scaling.fit("prompt", {"": tokens**0, "tokens": tokens}, {"tokens^2": tokens**2}, ms)
    assert f"{100 * 0.01 * 512**2 / ms[-1]:+.1f}% of the longest step" in capsys.readouterr().out


@pytest.mark.skipif(load_kernels() is None, reason="the extension is not built")
@pytest.mark.parametrize("more", ((), ("--busy",)))
def test_it_runs_to_its_end_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
                                      more: tuple[str, ...]) -> None:
    for name, values in (("ROWS", (1, 8, 16)), ("CONTEXTS", (16, 64)), ("PROMPTS", (16, 32, 48, 64))):
        monkeypatch.setattr(scaling, name, values)
    model, plot = tiny.write_hf(tmp_path / "model", arrays=tiny.hf_arrays()), tmp_path / "plot.svg"
    monkeypatch.setattr("sys.argv", ["bench_step_scaling.py", str(model), "--rounds", "1", "--svg", str(plot), *more])
    scaling.main()
    page = capsys.readouterr().out
    assert "| 16 rows |" in page and "with keys^2" in page and "with tokens^3" in page
    drawing = ElementTree.parse(plot).getroot()
    assert [text.text for text in drawing.findall(".//{*}text") if text.text == "prompt"] == ["prompt"]
