"""What the network is, declaratively. families.py fills a spec from a config or GGUF metadata; decoder.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.interface import SourceTensor


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with pre-norm blocks, rotary positions and a gated MLP."""

    family: str                    # key into families.FAMILIES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int                # rows of the embedding
    max_position: int              # tokens the model was trained for
    norm_eps: float
    rope_theta: float
    has_tied_head: bool
    has_qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                     "vocab_size", "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")


# Canonical weight names. Matrices are SourceTensors [outputs, inputs]; norms and biases are float32 vectors.
#   embed  final_norm  head (absent when tied)
#   layers.{i}.  attn_norm  q  k  v  q_bias  k_bias  v_bias  o  mlp_norm  gate  up  down
Weights = Mapping[str, SourceTensor | NDArray[np.float32]]
