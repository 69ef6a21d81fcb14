"""docs/notebooks/compare.ipynb runs from top to bottom, on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.model import tiny

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "compare.ipynb"


def test_the_notebook_runs_and_draws_its_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra notebook is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra notebook is not installed")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PACELINE_NOTEBOOK_MODEL", str(tiny.write_hf(tmp_path / "tiny")))
    monkeypatch.setenv("PACELINE_NOTEBOOK_ARGS", "--prompt-tokens 10..60 --output-tokens 5..30 --requests 6 "
                                                 "--concurrency 2,4 --num-kv-blocks 12")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("JUPYTER_PATH", str(kernel(tmp_path)))
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs for cell in book.cells if cell.cell_type == "code"), "it is kept without outputs"
    nbclient.NotebookClient(book, timeout=240, kernel_name="here", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    said = "".join(output.get("text", "") for output in outputs)
    assert "gave the most output tokens per second" in said and "times the output tokens/s of static" in said


def kernel(tmp_path: Path) -> Path:
    """A kernel of this very Python, whichever environment it lives in."""
    folder = tmp_path / "jupyter" / "kernels" / "here"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(
        f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"], '
        '"display_name": "here", "language": "python"}')
    return tmp_path / "jupyter"
