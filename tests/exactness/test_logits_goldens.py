"""Logits of the real model in f32 against goldens that transformers made (tests/golden/make_logits_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.build import assemble, llm_around, load_model
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig
from paceline.ops.cpu import available_paths
from tests.golden.prompts import PROMPTS

GOLDENS = np.load(Path(__file__).parents[1] / "golden" / "smollm2_logits.npz")
TOLERANCE = 1e-3    # absolute, of logits that reach 30: two float32 sums of 576 terms through 30 layers


@pytest.mark.parametrize("path", [*available_paths(), "numpy"])
def test_f32_logits_equal_the_goldens(path: str) -> None:
    loaded = load_model(ModelConfig(dtype="f32", kv_dtype="f32", isa=path, max_model_len=256))
    engine = assemble(loaded, CacheConfig(num_kv_blocks=64), SchedulerConfig(), keep_logits=True)
    with llm_around(engine, ModelConfig()) as llm:
        for index in range(len(PROMPTS) if path != "numpy" else 4):
            prompt = [int(token_id) for token_id in GOLDENS[f"{index}.prompt"]]
            llm.generate([prompt], max_tokens=1, temperature=0, show_progress=False)
            logits = engine.executor.last_logits
            assert logits is not None
            ids, expected = GOLDENS[f"{index}.ids"], GOLDENS[f"{index}.logits"]
            np.testing.assert_allclose(logits[0, ids], expected, rtol=0, atol=TOLERANCE, err_msg=PROMPTS[index])
