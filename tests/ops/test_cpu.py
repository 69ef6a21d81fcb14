"""The compiled kernels against the reference: the same weights to the bit, the same logits up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError, InvariantError, ModelError
from paceline.model.decoder import record_decoder
from paceline.ops.cpu import CpuBackend, load_kernels
from paceline.ops.dequantize import DEQUANTIZERS
from paceline.ops.interface import SourceTensor
from paceline.ops.machine import usable_cores
from paceline.ops.numpy_ops import NumpyBackend
from paceline.ops.numpy_sampler import sample_reference
from tests.model import blocks
from tests.runner.helpers import encoded, kv_of, one_row_batch, prompt, random_weights, sampling_rows, tiny_spec

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the extension is not built")

# Largest difference of logits, relative to the largest logit: f32 rounds in another order, bf16 rounds activations to
# 8 bits of mantissa, int8 and int4 quantise them to 8 bits a group of 32.
TOLERANCE = {"f32": 1e-5, "bf16": 0.02, "int8": 0.05, "int4": 0.05}


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("source_type", DEQUANTIZERS)
def test_packed_values_are_the_references(source_type: str, form: str) -> None:
    rng, cpu, reference = np.random.default_rng(0), CpuBackend(num_threads=1), NumpyBackend()
    plain = [blocks.source(source_type, num_outputs, 256, seed=num_outputs) for num_outputs in (20, 5)]
    order = rng.permutation(20)
    sources = [SourceTensor("w", 20, 256, source_type, plain[0].raw, order), plain[1]]
    packed = cpu.pack(sources, form)
    assert (packed.form, packed.num_outputs, packed.num_inputs) == (form, 25, 256) and packed.num_bytes > 0
    np.testing.assert_array_equal(cpu.unpack(packed), reference.unpack(reference.pack(sources, form)))


@pytest.mark.parametrize("path", load_kernels().paths() if load_kernels() else [])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_logits_are_near_the_references(path: str, dtype: str, kv_dtype: str) -> None:
    spec, tokens, logits = tiny_spec(has_qkv_bias=True), prompt(5, 40), []
    for backend in (NumpyBackend(), CpuBackend(path, num_threads=2)):
        program = record_decoder(spec, random_weights(spec), backend, dtype, spec.max_position)
        runner = backend.bind(program, kv_of(spec, dtype=kv_dtype))
        logits.append(runner.step(one_row_batch(tokens, 0, [3, 9, 1]), wants_logits=True).logits)
        runner.close()
    tolerance = TOLERANCE[dtype] if kv_dtype == "f32" else max(TOLERANCE[dtype], 0.02)
    assert np.abs(logits[1] - logits[0]).max() <= tolerance * np.abs(logits[0]).max()


def test_threads_and_paths_are_checked() -> None:
    assert CpuBackend().num_threads == usable_cores()
    assert CpuBackend(num_threads=3).num_threads == 3
    with pytest.raises(ConfigError, match=r"nonsense.*portable"):
        CpuBackend("nonsense")


def test_a_weight_that_cannot_be_packed_is_named() -> None:
    with pytest.raises(ModelError, match=r"layers\.7\.q"):
        CpuBackend().pack([encoded("layers.7.q", np.full((2, 32), np.nan), "F32")], "int8")


def test_what_the_kernels_cannot_run_is_refused() -> None:
    spec, backend = tiny_spec(head_dim=8), CpuBackend(num_threads=1)
    program = record_decoder(spec, random_weights(spec), backend, "f32", 64)
    with pytest.raises(ConfigError, match="head_dim"):
        backend.bind(program, kv_of(spec))


def test_an_index_out_of_range_is_a_bug_of_ours() -> None:
    spec, backend = tiny_spec(), CpuBackend(num_threads=1)
    runner = backend.bind(record_decoder(spec, random_weights(spec), backend, "f32", 64), kv_of(spec, num_blocks=4))
    for tokens, start, table in (([160], 0, [0]), ([-1], 0, [0]), ([1], 0, [4]), ([1], 64, [0, 1, 2, 3, 0])):
        with pytest.raises(InvariantError):
            runner.step(one_row_batch(tokens, start, table))


@pytest.mark.parametrize("path", load_kernels().paths() if load_kernels() else [])
def test_draws_are_the_references(path: str) -> None:
    rng, num_rows = np.random.default_rng(2), 400
    logits = (3 * rng.standard_normal((num_rows, 1500))).astype(np.float32)
    logits[::7] = np.round(logits[::7])    # ties
    logits[5, 3], logits[6, 4], logits[8, 9] = np.nan, np.inf, -np.inf
    sampling = sampling_rows(
        num_rows, temperature=rng.choice([0.0, 0.3, 1.0, 2.0], num_rows), top_k=rng.choice([0, 1, 5, 300], num_rows),
        top_p=rng.choice([0.1, 0.7, 0.95, 1.0], num_rows), seed=rng.integers(0, 1 << 63, num_rows),
        position=np.arange(num_rows))
    columns = [getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed", "prompt_index",
                                                    "choice_index", "position", "wants_logprob")]
    token_ids, logprobs, *_ = load_kernels().sample(path, logits, *columns)
    expected_ids, expected_logprobs, *_ = sample_reference(logits, sampling)
    assert (token_ids != expected_ids).sum() <= 1    # a draw may fall on the last bit of a border
    same = token_ids == expected_ids
    np.testing.assert_allclose(logprobs[same], expected_logprobs[same], rtol=1e-5, atol=1e-5)
