"""Canonical weights (spec.py) out of a file's tensors. Strict: a missing, surplus or wrongly shaped tensor is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.interface import SourceTensor
from .family_table import FAMILIES, GGUF_NAMES, HF_NAMES
from .rope import LONG_FACTORS, SHORT_FACTORS, LongRopeScaling
from .spec import ModelSpec
from .stored import StoredTensor

logger = logging.getLogger(__name__)

_HF_IGNORED_SUFFIX = ".rotary_emb.inv_freq"     # a buffer of old checkpoints; we compute it

Canonical = dict[str, SourceTensor | NDArray[np.float32]]


def weights_from_config(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> Canonical:
    """Canonical weights of a Hugging Face checkpoint. A tied head's own copy of the embedding is left alone."""
    family = FAMILIES[spec.family]
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_HF_IGNORED_SUFFIX)}
    if spec.has_tied_head and kept.pop(HF_NAMES["head"], None) is not None:
        logger.info("%s: %s is ignored: tie_word_embeddings is true", where, HF_NAMES["head"])
    weights = _canonical(spec, kept, {**HF_NAMES, **family.hf_names}, where, {})
    if family.has_offset_norms:
        for name, values in weights.items():
            if name.endswith("norm") and isinstance(values, np.ndarray):
                weights[name] = values + np.float32(1)
    return weights


def weights_from_gguf(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> Canonical:
    """Canonical weights of a GGUF file; where its family permutes q and k, row_order undoes that."""
    family, row_orders = FAMILIES[spec.family], {}
    if isinstance(spec.rope_scaling, LongRopeScaling):    # which holds their values
        tensors = {name: tensor for name, tensor in tensors.items() if name not in (LONG_FACTORS, SHORT_FACTORS)}
    if spec.head_dim % 2 == 0 and family.gguf_permutes_qk and spec.num_layers <= len(tensors):
        row_orders = {"q": unpermuted_rows(spec.num_heads, spec.head_dim),
                      "k": unpermuted_rows(spec.num_kv_heads, spec.head_dim)}
    return _canonical(spec, tensors, {**GGUF_NAMES, **family.gguf_names}, where, row_orders)


def unpermuted_rows(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row i of the checkpoint is row unpermuted_rows[i] of the GGUF file: there, row 2j + half of a head is the
    checkpoint's row half * head_dim / 2 + j."""
    rows = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every weight of the spec, in the order of the forward pass."""
    yield "embed", (spec.vocab_size, spec.hidden_size)
    if spec.has_rope_factors:
        yield "rope_factors", (spec.rotated_dims // 2,)
    for layer in range(spec.num_layers):
        for name, shape in (*_attention_shapes(spec), *_mlp_shapes(spec)):
            yield f"layers.{layer}.{name}", shape
    yield from _norm("final_norm", spec)
    if not spec.has_tied_head:
        yield "head", (spec.vocab_size, spec.hidden_size)


def _attention_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.norm_placement != "after":
        yield from _norm("attn_norm", spec)
    for name, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
        yield from _linear(name, width, spec.hidden_size, spec.has_qkv_bias)
    if spec.qk_norm != "none":
        yield "q_norm", (spec.q_width if spec.qk_norm == "width" else spec.head_dim,)
        yield "k_norm", (spec.kv_width if spec.qk_norm == "width" else spec.head_dim,)
    yield from _linear("o", spec.hidden_size, spec.q_width, spec.has_o_bias)
    if spec.norm_placement != "before":
        yield from _norm("attn_post_norm", spec)


def _mlp_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.norm_placement != "after":
        yield from _norm("mlp_norm", spec)
    yield from _linear("gate", spec.intermediate_size, spec.hidden_size, spec.has_mlp_bias)
    yield from _linear("up", spec.intermediate_size, spec.hidden_size, spec.has_mlp_bias)
    yield from _linear("down", spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias)
    if spec.norm_placement != "before":
        yield from _norm("mlp_post_norm", spec)


def _norm(name: str, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (spec.hidden_size,)
    if spec.norm == "layer":
        yield f"{name}_bias", (spec.hidden_size,)


def _linear(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}_bias", (num_outputs,)


def _canonical(spec: ModelSpec, tensors: Mapping[str, StoredTensor], names: Mapping[str, str], where: str,
               row_orders: Mapping[str, NDArray[np.int64]]) -> Canonical:
    if spec.num_layers > len(tensors):      # before any loop over a number the file merely claims
        raise ModelError(f"{where}: {spec.num_layers} layers are declared, the weights hold {len(tensors)} tensors")
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim {spec.head_dim} is odd; rotary positions need pairs")
    expected = {name: (_file_name(name, names), shape) for name, shape in expected_shapes(spec)}
    _refuse_mismatch(expected, tensors, where)
    taken: dict[str, int] = {}      # rows already given out of a tensor that several weights share
    weights: Canonical = {}
    for name, (file_name, shape) in expected.items():
        row_order = row_orders.get(name.rpartition(".")[2].removesuffix("_bias"))
        tensor, first = tensors[file_name], taken.get(file_name, 0)
        taken[file_name] = first + shape[0]
        if tensor.shape == shape:
            weights[name] = tensor.to_vector(row_order) if len(shape) == 1 else tensor.to_matrix(row_order)
        else:
            weights[name] = _rows(tensor, first, shape)
    return weights


def _rows(tensor: StoredTensor, first: int, shape: tuple[int, ...]) -> SourceTensor | NDArray[np.float32]:
    """Rows [first, first + shape[0]) of a tensor that several weights share."""
    if len(shape) == 1:
        return tensor.to_vector()[first : first + shape[0]]
    whole = tensor.to_matrix()
    return replace(whole, num_outputs=shape[0], raw=whole.raw[first : first + shape[0]])


def _file_name(canonical: str, names: Mapping[str, str]) -> str:
    layer, name = "", canonical
    if canonical.startswith("layers."):
        _, layer, name = canonical.split(".")
    stem = name.removesuffix("_bias")
    file_name = names[stem].format(i=layer)
    return file_name if stem == name else file_name.removesuffix(".weight") + ".bias"


def _refuse_mismatch(expected: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, StoredTensor],
                     where: str) -> None:
    file_names = {file_name for file_name, _ in expected.values()}
    missing = [name for name in file_names if name not in tensors]
    surplus = [name for name in tensors if name not in file_names]
    if missing or surplus:
        raise ModelError(f"{where}: tensors missing: {_listed(missing)}; not used by this family: {_listed(surplus)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for file_name, shape in expected.values():
        shared = shapes.get(file_name, (0,))
        shapes[file_name] = (shared[0] + shape[0], *shape[1:])
    for canonical, (file_name, _) in expected.items():
        found, shape = tensors[file_name].shape, shapes[file_name]
        if found != shape:
            field = " (vocab_size against the embedding's rows)" if canonical in ("embed", "head") else ""
            raise ModelError(f"{where}: tensor {file_name}: shape {list(found)}, the config says {list(shape)}{field}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
