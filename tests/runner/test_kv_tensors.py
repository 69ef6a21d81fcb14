"""How many blocks, and whether the machine has the memory."""

from __future__ import annotations

import pytest

from paceline.config import CacheConfig
from paceline.errors import ConfigError
from paceline.model.layer_groups import layer_groups
from paceline.runner.kv_tensors import check_kv_memory, check_weights_memory, kv_spec, num_blocks_for

from .helpers import kv_of, tiny_spec

BLOCK_BYTES = 2 * 2 * 2 * 16 * 2 * 16    # k and v, layers, heads, dim, bf16, tokens


def test_bytes_per_block() -> None:
    assert kv_of(tiny_spec()).bytes_per_block == BLOCK_BYTES
    assert kv_of(tiny_spec(), dtype="f32").bytes_per_block == 2 * BLOCK_BYTES
    assert kv_of(tiny_spec(), block_size=64).bytes_per_block == 4 * BLOCK_BYTES


def test_blocks_that_fit() -> None:
    kv = kv_of(tiny_spec())
    assert num_blocks_for(BLOCK_BYTES * 7 + BLOCK_BYTES - 1, kv) == 7
    with pytest.raises(ConfigError, match=f"kv_memory_bytes={BLOCK_BYTES - 1} .*{BLOCK_BYTES} bytes"):
        num_blocks_for(BLOCK_BYTES - 1, kv)


def test_a_number_of_blocks_outranks_a_number_of_bytes() -> None:
    groups = layer_groups(tiny_spec(), 100)
    assert kv_spec(tiny_spec(), groups, CacheConfig(num_kv_blocks=5), "bf16").num_blocks == 5
    sized = kv_spec(tiny_spec(), groups, CacheConfig(kv_memory_bytes=1 << 20, block_size=32), "f32")
    assert (sized.num_blocks, sized.block_size, sized.dtype) == ((1 << 20) // (4 * BLOCK_BYTES), 32, "f32")


def test_more_than_there_is_names_both_numbers() -> None:
    kv = kv_of(tiny_spec(), num_blocks=100)
    check_kv_memory(kv, available_bytes=100 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=rf"{100 * BLOCK_BYTES} bytes .*{40 * BLOCK_BYTES} bytes are.*at most 40"):
        check_kv_memory(kv, available_bytes=40 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="available"):
        check_kv_memory(kv_of(tiny_spec(), num_blocks=1 << 40))    # no machine has this


def test_weights_too_are_refused_before_they_are_packed() -> None:
    check_weights_memory(1000, available_bytes=1000)
    with pytest.raises(ConfigError, match=r"1001 bytes, 1000 bytes"):
        check_weights_memory(1001, available_bytes=1000)
