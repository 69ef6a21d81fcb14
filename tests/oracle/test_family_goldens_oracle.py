"""The golden checkpoints as transformers reads them back from disk: config and weights say what we compared with."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.family_cases import CASES, DIRECTORY, TOKENS

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_golden_back(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        DIRECTORY / name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    with np.load(DIRECTORY / name / "expected.npz") as file:
        assert np.abs(logits - file["logits"]).max() < 1e-4
