"""A tiny llama checkpoint, written as GGUF and as a Hugging Face directory with the same values and tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.model.stored import StoredTensor
from paceline.model.tokenizer import CHAR_OF_BYTE

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 64, 4, 2, 16, 96
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*SPECIALS, *(CHAR_OF_BYTE[byte] for byte in range(256)), "he", "ll", "hell", "hello", "Ġw"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"

Arrays = dict[str, NDArray[np.float32]]


def hf_config(**changes: Any) -> dict[str, Any]:
    """A config.json; a change to None removes the field."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE, "vocab_size": len(TOKENS), "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }
    return {name: value for name, value in config.items() if value is not None}


def hf_arrays(seed: int = 0) -> Arrays:
    """The checkpoint's tensors by their Hugging Face names, float32; exact in F16 and BF16."""
    rng = np.random.default_rng(seed)

    def values(*shape: int) -> NDArray[np.float32]:
        return rng.integers(-8, 8, shape).astype(np.float32) / 8

    arrays = {"model.embed_tokens.weight": values(len(TOKENS), HIDDEN), "model.norm.weight": values(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        arrays[prefix + "input_layernorm.weight"] = values(HIDDEN)
        arrays[prefix + "post_attention_layernorm.weight"] = values(HIDDEN)
        arrays[prefix + "self_attn.q_proj.weight"] = values(HEADS * HEAD_DIM, HIDDEN)
        arrays[prefix + "self_attn.k_proj.weight"] = values(KV_HEADS * HEAD_DIM, HIDDEN)
        arrays[prefix + "self_attn.v_proj.weight"] = values(KV_HEADS * HEAD_DIM, HIDDEN)
        arrays[prefix + "self_attn.o_proj.weight"] = values(HIDDEN, HEADS * HEAD_DIM)
        arrays[prefix + "mlp.gate_proj.weight"] = values(INTERMEDIATE, HIDDEN)
        arrays[prefix + "mlp.up_proj.weight"] = values(INTERMEDIATE, HIDDEN)
        arrays[prefix + "mlp.down_proj.weight"] = values(HIDDEN, INTERMEDIATE)
    return arrays


def build_tokenizer() -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    inner = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return inner


def write_hf(directory: Path, config: dict[str, Any] | None = None, arrays: Arrays | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<|im_start|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}))
    build_tokenizer().save(str(directory / "tokenizer.json"))
    save_file(hf_arrays() if arrays is None else arrays, directory / "model.safetensors")
    return directory


def write_safetensors(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """safetensors.numpy cannot write F8_E4M3."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.source_type, "shape": list(tensor.shape),
                        "data_offsets": [at, at + tensor.raw.size]}
        at += tensor.raw.size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.raw.tobytes() for t in tensors.values()))


def permuted(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, arrays: Arrays | None = None, quantization: str = "F32", split_tensors: int = 0,
               **metadata: Any) -> Path:
    """The same checkpoint as GGUF; matrices in `quantization`. metadata: extra llama.* integer keys. split_tensors:
    so many tensors a file."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_tensors)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    for name, value in metadata.items():
        writer.add_uint32(f"llama.{name}", value)
    _add_tokenizer(writer)
    for name, array in gguf_arrays(hf_arrays() if arrays is None else arrays).items():
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else gguf.GGMLQuantizationType[quantization]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def gguf_arrays(arrays: Arrays) -> Arrays:
    renames = [
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
        ("model.layers.", "blk."), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down")]
    converted = {}
    for name, array in arrays.items():
        if "q_proj" in name or "k_proj" in name:
            array = permuted(array, HEADS if "q_proj" in name else KV_HEADS)
        for old, new in renames:
            name = name.replace(old, new)
        converted[name] = np.ascontiguousarray(array)
    return converted
