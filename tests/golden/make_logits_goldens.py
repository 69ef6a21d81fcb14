"""Writes smollm2_logits.npz from transformers (environment of `make oracle`):
python -m tests.golden.make_logits_goldens"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.model.loader import open_model
from tests.golden.prompts import PROMPTS
from tests.oracle.transformers_model import last_logits

NUM_KEPT = 256    # the likeliest, and as many spread over the vocabulary


def main() -> None:
    tokenizer = open_model("smollm2").tokenizer
    kept: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(PROMPTS):
        token_ids = tokenizer.encode(prompt, True)
        logits = last_logits(token_ids)
        best = np.argsort(-logits, kind="stable")[:NUM_KEPT]
        ids = np.unique(np.concatenate([best, np.arange(index, len(logits), len(logits) // NUM_KEPT)]))
        kept |= {f"{index}.prompt": np.array(token_ids, np.int32), f"{index}.ids": ids.astype(np.int32),
                 f"{index}.logits": logits[ids]}
    np.savez_compressed(Path(__file__).with_name("smollm2_logits.npz"), **kept)


if __name__ == "__main__":
    main()
