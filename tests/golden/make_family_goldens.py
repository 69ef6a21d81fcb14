"""Makes tests/golden/families/: one tiny random checkpoint a family, and what transformers computes from it.

Run with PyTorch and transformers: python -m tests.golden.make_family_goldens [NAME ...]
Weights are stored in BF16 and every one is random, norms and biases too, so that nothing is left out unnoticed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from paceline.model.tokenizer import CHAR_OF_BYTE
from tests.golden.family_cases import CASES, DIRECTORY, NUM_GREEDY, TOKENS


def make(name: str) -> None:
    import torch
    import transformers

    class_name, changes = CASES[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    config = getattr(transformers, class_name).config_class(**changes)
    config._attn_implementation = "eager"       # soft-caps are eager only
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(random_values(parameter_name, parameter).to(torch.bfloat16).to(torch.float32))
        model.tie_weights()
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
        greedy = greedy_tokens(model, torch)
    write(DIRECTORY / name, model, logits, greedy)


def random_values(name: str, parameter: Any) -> Any:
    import torch

    noise = torch.randn(parameter.shape)
    if parameter.ndim >= 2:    # 3: all experts of a layer
        return noise * (1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
    is_weight_near_one = "norm" in name and name.endswith("weight") and not bool((parameter == 0).all())
    return 0.2 * noise + (1.0 if is_weight_near_one else 0.0)


def greedy_tokens(model: Any, torch: Any) -> list[int]:
    tokens = list(TOKENS)
    for _ in range(NUM_GREEDY):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(TOKENS) :]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Ids are bytes."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({CHAR_OF_BYTE[byte]: byte for byte in range(256)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def write(directory: Path, model: Any, logits: Any, greedy: list[int]) -> None:
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:    # under the names of checkpoints, which differ from those in memory
        model.to(torch.bfloat16).save_pretrained(saved)
        shutil.copy(Path(saved) / "model.safetensors", directory)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    np.savez_compressed(directory / "expected.npz", logits=logits, greedy=np.array(greedy, np.int32))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory.name}: {size} bytes, logits {np.abs(logits).max():.2f} at most")
    assert size < 300_000


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
