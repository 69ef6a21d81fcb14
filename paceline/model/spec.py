"""What the network is, declaratively. families.py fills a spec from a config or GGUF metadata; decoder.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.interface import SourceTensor
from .rope import RopeScaling

CHOICES = {
    "norm": ("rms", "layer"),
    "norm_placement": ("before", "after", "both"),
    "activation": ("silu", "gelu_tanh"),
    "qk_norm": ("none", "head", "width"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: attention and a gated MLP, each added to a residual stream.

    With experts, a layer's MLP is a router and that many gated MLPs, of which each token goes through a few, and beside
    them may stand a shared one that takes every token, times the sigmoid of a gate of its own.
    """

    family: str                    # key into family_table.FAMILIES
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
    norm: str = "rms"              # rms, or layer (with a bias)
    norm_placement: str = "before"    # of a sublayer: its input, its output before it is added, or both
    activation: str = "silu"       # of the gated MLP
    qk_norm: str = "none"          # rms norm of q and k before rotation: every head, or the whole width as one
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    rotary_dim: int | None = None    # leading dims of a head that are rotated; None: all
    rope_scaling: RopeScaling | None = None
    has_rope_factors: bool = False    # the file holds divisors of the rotary frequencies
    unrotated_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0    # of what a sublayer adds
    attention_scale: float | None = None    # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None
    windows: tuple[int | None, ...] = ()    # one per layer: tokens a query sees, itself included; None: all before it
    window_rope_theta: float | None = None    # of layers with a window, unscaled; None: as the others
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_experts: int = 0           # of a layer; 0: every MLP is a plain one
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    has_renormalised_shares: bool = False    # the shares of a token's experts add up to 1
    shared_intermediate_size: int = 0        # of the shared expert; 0: there is none
    dense_layers: tuple[int, ...] = ()       # with a plain MLP all the same

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                     "vocab_size", "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_experts and (self.expert_intermediate_size < 1
                                 or not 1 <= self.experts_per_token <= self.num_experts):
            raise ModelError(f"model config: {self.num_experts} experts need experts_per_token from 1 to as many, got "
                             f"{self.experts_per_token}, and expert_intermediate_size of at least 1, got "
                             f"{self.expert_intermediate_size}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ModelError(f"model config: {name}={getattr(self, name)!r} is unknown; choose from {choices}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"model config: {len(self.windows)} windows for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"model config: a window must be at least 1 token, got {self.windows}")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ModelError(f"model config: rotary_dim must be even and at most head_dim {self.head_dim}, got "
                             f"{self.rotary_dim}")

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def rotated_dims(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


# Canonical weight names. Matrices are SourceTensors [outputs, inputs]; norms and biases are float32 vectors.
#   embed  rope_factors  final_norm  head (absent when tied)
#   layers.{i}.  attn_norm  q  k  v  q_norm  k_norm  o  attn_post_norm  mlp_norm  gate  up  down  mlp_post_norm
# with experts, in place of gate, up and down:
#   layers.{i}.  router  experts.{e}.gate  experts.{e}.up  experts.{e}.down
#   layers.{i}.  shared_router  shared_gate  shared_up  shared_down  (where an expert is shared)
# and for each of them that has a bias, NAME_bias.
Weights = Mapping[str, SourceTensor | NDArray[np.float32]]
