"""The list of formats in README.md, out of the tables that readers go by."""

from __future__ import annotations

from ..ops.dequantize import BLOCKS
from .decoder import AUTO_FORMS
from .prequantized import METHODS
from .rope import SCALINGS
from .safetensors import VALUE_TYPES
from .tokenizer_gguf import PRE_TOKENIZERS


def formats_markdown() -> str:
    """The table in README.md."""
    rows = {
        "GGUF, also in parts": [kind for kind in BLOCKS if kind in AUTO_FORMS],
        "safetensors, also sharded": VALUE_TYPES,
        "quantised checkpoints (`quant_method`)": METHODS,
        "tokenizers": ["tokenizer.json", "SentencePiece BPE of GGUF (`llama`)", "byte-level BPE of GGUF (`gpt2`)"],
        "pre-tokenizers of GGUF": PRE_TOKENIZERS,
        "rope scaling": SCALINGS,
    }
    lines = ["| | read |", "|---|---|", *(f"| {what} | {', '.join(names)} |" for what, names in rows.items())]
    return "\n".join(lines) + "\n"
