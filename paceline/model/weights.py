"""Canonical weights (spec.py) out of a file's tensors. Strict: a missing, surplus or wrongly shaped tensor is named."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod

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

Names = Mapping[str, str | tuple[str, ...]]
Canonical = dict[str, SourceTensor | NDArray[np.float32]]


def weights_from_config(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> Canonical:
    """Canonical weights of a Hugging Face checkpoint. A tied head's own copy of the embedding is left alone."""
    family = FAMILIES[spec.family]
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_HF_IGNORED_SUFFIX)}
    if spec.has_tied_head and kept.pop(HF_NAMES["head"], None) is not None:
        logger.info("%s: %s is ignored: tie_word_embeddings is true", where, HF_NAMES["head"])
    names: Names = {**HF_NAMES, **family.hf_names}
    weights = _canonical(spec, kept, names, where, {})
    if family.has_offset_norms:
        for name, values in weights.items():
            if name.endswith("norm") and isinstance(values, np.ndarray):
                weights[name] = values + np.float32(1)
    return weights


def weights_from_gguf(spec: ModelSpec, tensors: Mapping[str, StoredTensor], where: str) -> Canonical:
    """Canonical weights of a GGUF file; where its family permutes q and k, row_order undoes that."""
    family = FAMILIES[spec.family]
    if isinstance(spec.rope_scaling, LongRopeScaling):    # which holds their values
        tensors = {name: tensor for name, tensor in tensors.items() if name not in (LONG_FACTORS, SHORT_FACTORS)}
    permuted = {"q": spec.num_heads, "k": spec.num_kv_heads} if family.gguf_permutes_qk else {}
    return _canonical(spec, tensors, {**GGUF_NAMES, **family.gguf_names}, where, permuted)


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
        for name, shape in (*_attention_shapes(spec), *_mlp_shapes(spec, layer)):
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


def _mlp_shapes(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.norm_placement != "after":
        yield from _norm("mlp_norm", spec)
    if spec.has_experts(layer):
        yield from _expert_shapes(spec)
    else:
        yield from _gated("", spec.intermediate_size, spec, spec.has_mlp_bias)
    if spec.norm_placement != "before":
        yield from _norm("mlp_post_norm", spec)


def _expert_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "router", (spec.num_experts, spec.hidden_size)
    for expert in range(spec.num_experts):
        yield from _gated(f"experts.{expert}.", spec.expert_intermediate_size, spec)
    if spec.shared_intermediate_size:
        yield "shared_router", (1, spec.hidden_size)
        yield from _gated("shared_", spec.shared_intermediate_size, spec)


def _gated(at: str, size: int, spec: ModelSpec, has_bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear(at + "gate", size, spec.hidden_size, has_bias)
    yield from _linear(at + "up", size, spec.hidden_size, has_bias)
    yield from _linear(at + "down", spec.hidden_size, size, has_bias)


def _norm(name: str, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (spec.hidden_size,)
    if spec.norm == "layer":
        yield f"{name}_bias", (spec.hidden_size,)


def _linear(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}_bias", (num_outputs,)


def _canonical(spec: ModelSpec, tensors: Mapping[str, StoredTensor], names: Names, where: str,
               permuted: Mapping[str, int]) -> Canonical:
    """permuted: weights whose rows come in another order, and how many heads these rows make."""
    if spec.num_layers > len(tensors):      # before any loop over a number the file merely claims
        raise ModelError(f"{where}: {spec.num_layers} layers are declared, the weights hold {len(tensors)} tensors")
    num_values = sum(prod(tensor.shape) for tensor in tensors.values())
    if spec.num_layers * spec.num_experts > num_values:
        raise ModelError(f"{where}: {spec.num_experts} experts are declared in each layer, the weights hold "
                         f"{num_values} values")
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim {spec.head_dim} is odd; rotary positions need pairs")
    expected = {name: (_file_name(name, names, tensors), shape) for name, shape in expected_shapes(spec)}
    _refuse_mismatch(expected, tensors, where)
    # Only now is the size of a head known to be that of a tensor in the file, not a number that fills the memory.
    row_orders = {name: unpermuted_rows(num_heads, spec.head_dim) for name, num_heads in permuted.items()}
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
    return tensor.rows_to_matrix(first, first + shape[0])


def _file_name(canonical: str, names: Names, tensors: Mapping[str, StoredTensor]) -> str:
    """Of several names the first that the file has; the first of all where it has none, to be missed by it."""
    layer, expert, name = "", "", canonical
    if canonical.startswith("layers."):
        _, layer, *rest, name = canonical.split(".")
        expert, name = (rest[1], "expert_" + name) if rest else ("", name)
    stem = name.removesuffix("_bias")
    found = names[stem]
    choices = [choice.format(i=layer, e=expert) for choice in ((found,) if isinstance(found, str) else found)]
    file_name = next((choice for choice in choices if choice in tensors), choices[0])
    return file_name if stem == name else file_name.removesuffix(".weight") + ".bias"


def _refuse_mismatch(expected: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, StoredTensor],
                     where: str) -> None:
    file_names = {file_name for file_name, _ in expected.values()}
    missing = [name for name in file_names if name not in tensors]
    surplus = [name for name in tensors if name not in file_names]
    if missing or surplus:
        raise ModelError(f"{where}: tensors missing: {_listed(missing)}; not used by this family: {_listed(surplus)}")
    rows, experts = defaultdict[str, int](int), defaultdict[str, set[str]](set)    # of a tensor that weights share
    for canonical, (file_name, shape) in expected.items():
        rows[file_name] += shape[0]
        if ".experts." in canonical:
            experts[file_name].add(canonical.split(".")[3])
    for canonical, (file_name, shape) in expected.items():
        found, num_experts = tensors[file_name].shape, len(experts[file_name]) or 1
        flat = (rows[file_name], *shape[1:])
        by_expert = (num_experts, rows[file_name] // num_experts, *shape[1:])
        if found not in ((flat, by_expert) if ".experts." in canonical else (flat,)):
            field = " (vocab_size against the embedding's rows)" if canonical in ("embed", "head") else ""
            needed = by_expert if num_experts > 1 else flat
            raise ModelError(f"{where}: tensor {file_name}: shape {list(found)}, the config says {list(needed)}{field}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
