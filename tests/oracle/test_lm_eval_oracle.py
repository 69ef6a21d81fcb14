"""lm-evaluation-harness asks our server over HTTP and transformers in process about the same f32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Server, start_server
from tests.golden.make_tokenizer_goldens import load_reference

pytestmark = pytest.mark.oracle
TASK = Path(__file__).parent / "lm_eval_task"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.oracle import transformers_model

    directory = tmp_path_factory.mktemp("f32")
    transformers_model.save_directory(directory)
    load_reference(directory)
    return directory


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Any:
    started = start_server("--dtype", "f32", "--kv-dtype", "f32", "--max-model-len", "512", model=str(checkpoint))
    yield started
    assert started.stop() == 0


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The harness reads the task's items through `datasets`, which keeps its copies in the user's home otherwise."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def log_likelihoods(model: str, model_args: dict[str, Any]) -> list[list[tuple[float, bool]]]:
    """Of each item, each choice's log-likelihood and whether greedy decoding would give it."""
    import lm_eval
    import yaml

    task = yaml.safe_load((TASK / "completions_small.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(TASK / "items.jsonl")
    done = lm_eval.simple_evaluate(model=model, model_args=model_args, tasks=[task], log_samples=True,
                                   bootstrap_iters=0)
    samples = sorted(done["samples"]["completions_small"], key=lambda sample: sample["doc_id"])
    return [[(float(value), bool(is_greedy)) for value, is_greedy in sample["filtered_resps"]] for sample in samples]


def test_every_log_likelihood_is_that_of_transformers(checkpoint: Path, server: Server) -> None:
    theirs = log_likelihoods("hf", {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu"})
    ours = log_likelihoods("local-completions", {
        "model": str(checkpoint), "base_url": f"{server.url}/v1/completions", "tokenizer": str(checkpoint),
        "num_concurrent": 4, "max_retries": 1})
    assert len(ours) == len(theirs) == len((TASK / "items.jsonl").read_text(encoding="utf-8").splitlines())
    for mine, other in zip(ours, theirs, strict=True):
        for (value, is_greedy), (expected, is_expected) in zip(mine, other, strict=True):
            assert abs(value - expected) < 1e-3
            assert is_greedy == is_expected
