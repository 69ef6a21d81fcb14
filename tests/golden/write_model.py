"""Writes a llama or qwen2 model that paceline can open as other files of the same shape, for measurements.

    python -m tests.golden.write_model MODEL OUT [--type BF16] [--shuffle SEED]

OUT is a Hugging Face directory (BF16, awq, gptq, fp8) or a GGUF file (Q4_1, Q8_0, ...). BF16 keeps MODEL's weights,
rounded to bf16. The other types are for timing alone: every matrix of one shape is the same.

With --shuffle the hidden dimensions, those between gate and down, and those of a head between v and o are permuted
first. The network computes the same function, but a quantiser's groups of 32 inputs hold other weights than in the file
that MODEL came from, so that the grid of an earlier quantisation does not show through.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.model.family_table import FAMILIES, GGUF_NAMES, HF_NAMES
from paceline.model.loader import ModelFiles, open_model
from paceline.model.spec import ModelSpec
from paceline.model.stored import StoredTensor
from paceline.model.tokenizer import CHAR_OF_BYTE
from paceline.model.weights import expected_shapes
from paceline.ops.dequantize import bf16_bits, dequantize
from paceline.ops.interface import SourceTensor
from tests.model import quantized, tiny

Values = NDArray[np.float32]
DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "uint8": "F8_E4M3"}
QUANTIZED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="BF16", help="BF16, awq, gptq, fp8, or a GGUF type (default: BF16)")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="permute the dimensions; BF16 only")
    arguments = parser.parse_args()
    if arguments.type == "BF16" or arguments.type in QUANTIZED:
        write_directory(arguments.model, arguments.out, arguments.type, arguments.shuffle)
    else:
        write_gguf(arguments.model, arguments.out, arguments.type)


# ---- Hugging Face directories

def write_directory(model: str, directory: Path, kind: str = "BF16", shuffle_seed: int | None = None) -> Path:
    files = open_model(model)
    spec = files.spec
    shuffle = None if shuffle_seed is None else Shuffle(spec, shuffle_seed)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, StoredTensor] = {}
    for name, values in _canonical(files):
        values = values if shuffle is None else shuffle(name, values)
        for stored_name, array in _stored(kind, _file_name(name, HF_NAMES), values).items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors[stored_name] = StoredTensor(stored_name, array.shape, DTYPES[str(array.dtype)], raw)
    tiny.write_safetensors(directory / "model.safetensors", tensors)
    config = _config(spec) | ({"quantization_config": QUANTIZED[kind]} if kind in QUANTIZED else {})
    (directory / "config.json").write_text(json.dumps(config))
    files.tokenizer.inner.save(str(directory / "tokenizer.json"))
    return directory


def _canonical(files: ModelFiles) -> Iterator[tuple[str, Values]]:
    for name, _ in expected_shapes(files.spec):
        weight = files.weights[name]
        yield name, dequantize(weight) if isinstance(weight, SourceTensor) else weight


def _file_name(canonical: str, names: Any) -> str:
    _, layer, name = ("", "", canonical) if "." not in canonical else canonical.split(".")
    file_name: str = names[name.removesuffix("_bias")].format(i=layer)
    return file_name.removesuffix(".weight") + ".bias" if name.endswith("_bias") else file_name


def _config(spec: ModelSpec) -> dict[str, Any]:
    if spec.family not in ("llama", "qwen2") or spec.rope_scaling is not None:
        raise SystemExit(f"{spec.family} with rope_scaling={spec.rope_scaling}: only plain llama and qwen2 are written")
    return {
        "architectures": [FAMILIES[spec.family].hf_architecture], "model_type": spec.family,
        "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_size, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "hidden_act": "silu",
        "intermediate_size": spec.intermediate_size, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position, "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.has_tied_head,
    }


def _stored(kind: str, name: str, values: Values) -> dict[str, NDArray[Any]]:
    if kind == "BF16" or not name.endswith("_proj.weight"):
        return {name: bf16_bits(values)}
    return {name.removesuffix("weight") + part: array for part, array in _quantized(kind, values.shape).items()}


@cache
def _quantized(kind: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    if kind == "fp8":
        codes = np.random.default_rng(0).integers(0, 0x7F, shape).astype(np.uint8)    # no NaN
        return {"weight": codes, "weight_scale_inv": np.full([-(-n // 128) for n in shape], 1e-4, np.float32)}
    write = quantized.awq_arrays if kind == "awq" else quantized.gptq_arrays
    linear = quantized.quantized(_random(shape), 128, is_symmetric=False)
    return {name.removeprefix("."): array for name, array in write("", linear).items()}


def _random(shape: tuple[int, ...]) -> Values:
    return np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)


class Shuffle:
    """The same network with its dimensions in another order."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        rng = np.random.default_rng(seed)
        group = spec.num_heads // spec.num_kv_heads
        of_heads = [rng.permutation(spec.head_dim) for _ in range(spec.num_kv_heads)]
        self.hidden, self.inner = rng.permutation(spec.hidden_size), rng.permutation(spec.intermediate_size)
        self.kv = np.concatenate([head * spec.head_dim + dims for head, dims in enumerate(of_heads)])
        self.heads = np.concatenate([head * spec.head_dim + of_heads[head // group] for head in range(spec.num_heads)])

    def __call__(self, name: str, values: Values) -> Values:
        rows = {"o": self.hidden, "down": self.hidden, "gate": self.inner, "up": self.inner, "v": self.kv,
                "v_bias": self.kv, "attn_norm": self.hidden, "mlp_norm": self.hidden, "final_norm": self.hidden}
        columns = {"down": self.inner, "o": self.heads}
        name = name.rpartition(".")[2]
        values = values[rows[name]] if name in rows else values
        return values[:, columns.get(name, self.hidden)] if values.ndim == 2 else values


# ---- GGUF files

def write_gguf(model: str, path: Path, kind: str) -> Path:
    files = open_model(model)
    spec, family = files.spec, FAMILIES[files.spec.family]
    assert family.gguf_architecture is not None
    writer = gguf.GGUFWriter(path, family.gguf_architecture)
    _add_metadata(writer, spec)
    _add_tokenizer(writer, spec)
    matrix_type = gguf.GGMLQuantizationType[kind]
    for name, shape in expected_shapes(spec):
        file_name = _file_name(name, {**GGUF_NAMES, **family.gguf_names})
        if len(shape) == 1:
            writer.add_tensor(file_name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(file_name, _blocks(matrix_type, (shape[0], shape[1])), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _blocks(kind: Any, shape: tuple[int, int]) -> NDArray[Any]:
    rows = gguf.quants.quantize(_random((min(shape[0], 64), shape[1])), kind)
    return np.resize(rows, (shape[0], rows.shape[1]))


def _add_metadata(writer: Any, spec: ModelSpec) -> None:
    adds: dict[Callable[..., None], Any] = {
        writer.add_block_count: spec.num_layers, writer.add_context_length: spec.max_position,
        writer.add_embedding_length: spec.hidden_size, writer.add_feed_forward_length: spec.intermediate_size,
        writer.add_head_count: spec.num_heads, writer.add_head_count_kv: spec.num_kv_heads,
        writer.add_key_length: spec.head_dim, writer.add_value_length: spec.head_dim,
        writer.add_layer_norm_rms_eps: spec.norm_eps, writer.add_rope_freq_base: spec.rope_theta,
    }
    for add, value in adds.items():
        add(value)


def _add_tokenizer(writer: Any, spec: ModelSpec) -> None:
    """A byte-level one; ids past the bytes are never encoded."""
    texts = [CHAR_OF_BYTE[byte] for byte in range(256)]
    texts += ["he", *(f"<{token_id}>" for token_id in range(257, spec.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types([1] * spec.vocab_size)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)


if __name__ == "__main__":
    main()
