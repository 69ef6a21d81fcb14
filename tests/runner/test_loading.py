"""Loading holds one weight at a time beside what it has packed. scripts/bench_load.py measures the bytes themselves."""

from __future__ import annotations

import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.model.decoder import record_decoder
from paceline.ops.cpu import available_paths
from paceline.ops.interface import SourceTensor
from paceline.ops.numpy_ops import NumpyBackend

from .helpers import BACKENDS, random_weights, tiny_spec


class MadeOnAccess(Mapping[str, Any]):
    """Weights that exist only while somebody holds them; counts who is asked for, and how many are alive at once."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self.asked: Counter[str] = Counter()
        self.num_alive = self.most_alive = 0

    def __getitem__(self, name: str) -> Any:
        self.asked[name] += 1
        weight = self._weights[name]
        if not isinstance(weight, SourceTensor):
            return weight
        raw = weight.raw.copy()
        self.num_alive += 1
        self.most_alive = max(self.most_alive, self.num_alive)
        weakref.finalize(raw, self._gone)
        return replace(weight, raw=raw)

    def _gone(self) -> None:
        self.num_alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_weight_is_read_once_and_let_go_before_the_next_ones(backend: str) -> None:
    spec = tiny_spec(num_layers=3)
    weights = MadeOnAccess(random_weights(spec))
    record_decoder(spec, weights, BACKENDS[backend](), "bf16", spec.max_position)
    assert set(weights.asked.values()) == {1} and set(weights.asked) == set(weights)
    assert weights.most_alive <= 3 + 2    # q, k and v become one matrix; the next two are asked for before they go
    assert weights.num_alive == 0


@pytest.mark.parametrize("form", ("f32", "bf16", "int8", "int4"))
def test_the_compiled_packer_makes_no_copy_of_its_source(form: str) -> None:
    if not available_paths():
        pytest.skip("the kernels are not compiled here")
    values = np.ones((1024, 1024), np.float32)
    source = SourceTensor("w", 1024, 1024, "F32", values.view(np.uint8), np.arange(1024)[::-1].copy())
    backend = BACKENDS[f"cpu-{available_paths()[0]}"]()
    tracemalloc.start()
    backend.pack([source], form)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_the_numpy_packer_searches_4_bit_scales_in_bounded_memory() -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (4096, 1024)).astype(np.float32)
    source = SourceTensor("w", 4096, 1024, "F32", values.view(np.uint8))
    tracemalloc.start()
    NumpyBackend().pack([source], "int4")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * values.nbytes
