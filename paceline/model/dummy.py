"""Models of well-known shapes with random weights, for tests, benchmarks and capacity planning: `dummy:NAME`.

The values are made when asked for, one tensor at a time, from a block of random numbers that is repeated, so that the
7-billion shape costs memory bandwidth, not minutes. They depend on the tensor's name alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ..ops.interface import SourceTensor
from .rope import Llama3Scaling
from .spec import ModelSpec
from .tokenizer import CHAR_OF_BYTE, Tokenizer
from .weights import expected_shapes

DUMMY_SPECS: dict[str, ModelSpec] = {
    "smollm2-135m": ModelSpec(
        family="llama", num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
        intermediate_size=1536, vocab_size=49152, max_position=8192, norm_eps=1e-5, rope_theta=1e5, has_tied_head=True),
    "qwen2.5-0.5b": ModelSpec(
        family="qwen2", num_layers=24, hidden_size=896, num_heads=14, num_kv_heads=2, head_dim=64,
        intermediate_size=4864, vocab_size=151936, max_position=32768, norm_eps=1e-6, rope_theta=1e6,
        has_tied_head=True, has_qkv_bias=True),
    "qwen2.5-7b": ModelSpec(
        family="qwen2", num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128,
        intermediate_size=18944, vocab_size=152064, max_position=32768, norm_eps=1e-6, rope_theta=1e6,
        has_tied_head=False, has_qkv_bias=True),
    "llama-3.1-8b": ModelSpec(
        family="llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, max_position=131072, norm_eps=1e-5, rope_theta=5e5,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), has_tied_head=False),
    "olmoe-1b-7b": ModelSpec(
        family="olmoe", num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=16, head_dim=128,
        intermediate_size=1024, vocab_size=50304, max_position=4096, norm_eps=1e-5, rope_theta=1e4, has_tied_head=False,
        qk_norm="width", num_experts=64, experts_per_token=8, expert_intermediate_size=1024),
    "qwen3-30b-a3b": ModelSpec(
        family="qwen3moe", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, vocab_size=151936, max_position=40960, norm_eps=1e-6, rope_theta=1e6,
        has_tied_head=False, qk_norm="head", num_experts=128, experts_per_token=8, expert_intermediate_size=768,
        has_renormalised_shares=True),
}
DUMMY_CHAT_TEMPLATE = ("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
                       "{% if add_generation_prompt %}assistant: {% endif %}")
END_TOKEN, END_TOKEN_ID = "<|end|>", 256
_BLOCK_VALUES = 262_147     # prime: rows of a matrix start at different places of the block
_STANDARD_DEVIATION = 0.02


class DummyWeights(Mapping[str, SourceTensor | NDArray[np.float32]]):
    """Canonical weights of a spec: matrices in BF16, norms of ones, biases of zeros. Each access makes them anew."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = dict(expected_shapes(spec))

    def __getitem__(self, name: str) -> SourceTensor | NDArray[np.float32]:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.full(shape, 0.0 if name.endswith("_bias") else 1.0, np.float32)
        return SourceTensor(name, shape[0], shape[1], "BF16", _random_bf16(name, shape[0], shape[1]))

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _random_bf16(name: str, num_outputs: int, num_inputs: int) -> NDArray[np.uint8]:
    """uint8 [num_outputs, 2 * num_inputs]: normal numbers seeded by the name, truncated to bf16."""
    draws = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(_BLOCK_VALUES, np.float32)
    block = ((draws * np.float32(_STANDARD_DEVIATION)).view(np.uint32) >> 16).astype("<u2")
    return np.resize(block, (num_outputs, num_inputs)).view(np.uint8)


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, the others decode to " " and their number and are never encoded."""
    vocabulary = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    vocabulary[END_TOKEN] = END_TOKEN_ID
    space = CHAR_OF_BYTE[ord(" ")]
    vocabulary.update({f"{space}{token_id}": token_id for token_id in range(END_TOKEN_ID + 1, vocab_size)})
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    return Tokenizer(inner, {"eos_token": END_TOKEN})
