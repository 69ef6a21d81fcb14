"""What `info --quality` measures: an executor against another one, over a text cut into windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from paceline.cli import main
from paceline.model.stored import StoredTensor
from paceline.ops.interface import Backend
from paceline.runner import quality
from paceline.runner.quality import Window, compare, log_softmax, position_facts, windows
from tests.model import tiny

from .helpers import BACKENDS, make_executor, prompt

TEXT = windows(prompt(5, 150), (), 64)


def test_every_token_of_the_text_is_predicted_once_behind_a_bos_and_all_but_the_first_without_one() -> None:
    with_bos, without = windows(range(100, 230), (7,), 64), windows(range(100, 230), (), 64)
    assert [token for window in with_bos for token in window.token_ids[1:]] == list(range(100, 230))
    assert {window.token_ids[0] for window in with_bos} == {7}
    assert without == [Window(tuple(range(100, 164)), 1), Window(tuple(range(164, 228)), 1),
                       Window((228, 229), 1)]


def test_a_last_token_alone_predicts_nothing_and_is_left_out() -> None:
    assert [window.token_ids for window in windows(range(5), (), 4)] == [(0, 1, 2, 3)]


def test_the_figures_are_those_of_the_definitions() -> None:
    probabilities = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    reference = np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])
    facts = position_facts(np.array([0, 2]), np.log(probabilities).astype(np.float32) + 3,
                           np.log(reference).astype(np.float32))
    assert np.allclose(facts.loss, -np.log([0.5, 0.7])) and np.allclose(facts.reference_loss, -np.log([0.25, 0.8]))
    assert np.allclose(facts.kl, (reference * np.log(reference / probabilities)).sum(axis=1))
    assert facts.agrees.tolist() == [False, True]


def test_logits_far_from_zero_lose_no_probability() -> None:
    logits = np.array([[30000.0, 29999.0, -30000.0]], np.float32)
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1)


@pytest.mark.parametrize("make_backend", BACKENDS.values(), ids=BACKENDS)
def test_a_model_against_itself_changes_nothing(make_backend: Callable[[], Backend]) -> None:
    facts = compare(TEXT, make_executor(backend=make_backend()), make_executor(backend=make_backend()))
    assert (facts["predicted_tokens"], facts["windows"], facts["window_tokens"]) == (147, 3, 64)
    assert facts["perplexity"] == facts["reference_perplexity"] > 1
    assert (facts["perplexity_change_percent"], facts["mean_kl_nats"], facts["greedy_agreement"]) == (0, 0, 1)


def test_a_coarser_form_costs_more() -> None:
    cost = {form: compare(TEXT, make_executor(dtype=form), make_executor()) for form in ("bf16", "int8", "int4")}
    assert 0 < cost["bf16"]["mean_kl_nats"] < cost["int8"]["mean_kl_nats"] < cost["int4"]["mean_kl_nats"]
    assert 1 >= cost["bf16"]["greedy_agreement"] > cost["int4"]["greedy_agreement"]


def test_the_figures_do_not_depend_on_how_many_logits_a_step_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(TEXT, make_executor(dtype="int4"), make_executor())
    steps: list[int] = []
    monkeypatch.setattr(quality, "LOGITS_BYTES", 5 * 160 * 4)
    assert compare(TEXT, make_executor(dtype="int4"), make_executor(), steps.append) == whole
    assert max(steps) == 5 and sum(steps) == 147


@pytest.mark.parametrize("source_type", ("F32", "F16", "BF16"))
def test_a_directory_of_16_or_32_bits_is_quantised_as_it_loads(source_type: str, tmp_path: Path, capsys: Any) -> None:
    kind = gguf.GGMLQuantizationType[source_type]
    tensors = {name: StoredTensor(name, array.shape, source_type, gguf.quants.quantize(array / 8, kind).view(np.uint8))
               for name, array in tiny.hf_arrays().items()}
    tiny.write_safetensors(tiny.write_hf(tmp_path) / "model.safetensors", tensors)
    kl = {}
    for dtype in ("auto", "int8", "int4"):
        assert main(["info", str(tmp_path), "--dtype", dtype, "--kv-dtype", "f32", "--quality", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert dtype == "auto" or facts["quality"]["measured"] == f"weights {dtype}; KV f32"
        kl[dtype] = facts["quality"]["mean_kl_nats"]
    assert kl["auto"] < kl["int8"] < kl["int4"]
