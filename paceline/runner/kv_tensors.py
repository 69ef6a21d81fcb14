"""How much KV memory there is: bytes per block, blocks that fit, and whether the machine has that much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import CacheConfig
from ..errors import ConfigError
from ..model.layer_groups import LayerGroup
from ..model.spec import ModelSpec
from ..ops.interface import KVSpec
from ..ops.machine import available_memory_bytes


def kv_spec(model: ModelSpec, groups: Sequence[LayerGroup], cache: CacheConfig, kv_dtype: str) -> KVSpec:
    """The pool that the configuration asks for: num_kv_blocks, or what kv_memory_bytes holds."""
    shape = KVSpec(num_layers=max(len(group.layers) for group in groups), num_kv_heads=model.num_kv_heads,
                   head_dim=model.head_dim, block_size=cache.block_size, num_blocks=0, dtype=kv_dtype,
                   pages=cache.kv_pages)
    return replace(shape, num_blocks=cache.num_kv_blocks or num_blocks_for(cache.kv_memory_bytes, shape))


def num_blocks_for(num_bytes: int, kv: KVSpec) -> int:
    """Whole blocks that fit into num_bytes, at least one; kv.num_blocks is not read."""
    num_blocks = num_bytes // kv.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(f"kv_memory_bytes={num_bytes} holds no block: one takes {kv.bytes_per_block} bytes "
                          f"({kv.block_size} tokens of {kv.bytes_per_token})")
    return num_blocks


def kv_bytes(kv: KVSpec) -> int:
    return kv.num_blocks * kv.bytes_per_block


def check_weights_memory(weights_bytes: int, available_bytes: int | None = None) -> None:
    """Refuses, before anything is packed, weights that will not fit."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is not None and weights_bytes > available:
        raise ConfigError(f"the weights take {weights_bytes} bytes, {available} bytes are available; "
                          "choose a smaller dtype (int8, int4) or model")


def check_tables_memory(num_positions: int, rotated_dims: int, available_bytes: int | None = None) -> None:
    """Refuses a context whose rotary tables (float32) will not fit: what a damaged config may claim is any number."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    table_bytes = 4 * num_positions * rotated_dims
    if available is not None and table_bytes > available:
        raise ConfigError(f"the rotary tables of {num_positions} positions take {table_bytes} bytes, {available} bytes "
                          "are available; lower max_model_len")


def check_kv_memory(kv: KVSpec, available_bytes: int | None = None) -> None:
    """Refuses a pool larger than the memory that is free now (weights loaded). available_bytes: for tests; default:
    what the machine and its control groups say."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is not None and kv_bytes(kv) > available:
        fitting = available // kv.bytes_per_block
        raise ConfigError(f"the KV pool asks for {kv_bytes(kv)} bytes ({kv.num_blocks} blocks), {available} bytes are "
                          f"available; lower kv_memory_bytes or num_kv_blocks (at most {fitting} blocks fit)")
