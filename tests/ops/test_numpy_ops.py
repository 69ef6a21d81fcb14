"""Each verb against its formula, in float64, on a program of one node."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.kv.groups import NULL_BLOCK
from paceline.ops.interface import ForwardBatch, KVSpec
from paceline.ops.numpy_ops import VERBS, NumpyBackend, NumpyKVCache, NumpyStep, rotate
from paceline.ops.program import VERBS as VERB_NAMES
from paceline.ops.program import KVPlace, ProgramRecorder
from tests.runner.helpers import encoded, one_row_batch, sampling_rows

RNG = np.random.default_rng(0)
KV = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, num_blocks=8, dtype="f32")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def run_one(recorder: ProgramRecorder, inputs: list[np.ndarray], batch: ForwardBatch | None = None,
            cache: NumpyKVCache | None = None) -> NumpyStep:
    """Runs the single recorded node on these inputs (buffers in the order they were made)."""
    program = recorder.finish()
    step = NumpyStep(program, cache or NumpyKVCache(KV), batch or one_row_batch(range(5), 0, [0, 1]))
    for buffer, values in zip(step.buffers, inputs, strict=False):
        buffer[:] = values
    (node,) = program.nodes
    VERBS[node.verb](step, node)
    return step


def recorder() -> ProgramRecorder:
    return ProgramRecorder(num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=32)


def test_every_verb_has_its_function() -> None:
    assert tuple(VERBS) == VERB_NAMES


def test_embed_looks_rows_up() -> None:
    record, table = recorder(), normal(32, 32)
    out = record.embed(record.weight("w", NumpyBackend().pack([encoded("w", table, "F32")], "f32")),
                       record.buffer("tokens", 32))
    step = run_one(record, [], one_row_batch([3, 31, 0], 0, [0]))
    np.testing.assert_array_equal(step.buffers[out.buffer_id], table[[3, 31, 0]])


def test_rms_norm() -> None:
    record, x, weight = recorder(), normal(5, 32), normal(32)
    out = record.rms_norm(record.buffer("tokens", 32), record.weight("w", weight), 1e-5, record.buffer("tokens", 32))
    y = run_one(record, [x]).buffers[out.buffer_id]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight, rtol=2e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_fills_its_columns_only(has_bias: bool) -> None:
    record, x, weight, bias = recorder(), normal(5, 32), normal(12, 32), normal(12)
    name = record.weight("w", NumpyBackend().pack([encoded("w", weight, "F32")], "f32"))
    out = record.linear(record.buffer("tokens", 32), name, record.buffer("tokens", 20), 6,
                        record.weight("b", bias) if has_bias else None)
    y = run_one(record, [x, np.full((5, 20), 7)]).buffers[out.buffer_id]
    np.testing.assert_allclose(y[:, 6:18], x.astype(np.float64) @ weight.T + bias * has_bias, rtol=1e-4, atol=1e-5)
    assert (y[:, :6] == 7).all() and (y[:, 18:] == 7).all()


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    def angles(position: int) -> np.ndarray:
        turned = position * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        return np.concatenate([np.cos(turned), np.sin(turned)]).astype(np.float32)
    q, k = normal(1, 8), normal(1, 8)
    np.testing.assert_allclose(np.linalg.norm(rotate(q, angles(9))), np.linalg.norm(q), rtol=1e-5)
    near, far = (float(rotate(q, angles(p + 3))[0] @ rotate(k, angles(p))[0]) for p in (0, 50))
    assert near == pytest.approx(far, abs=1e-4)
    np.testing.assert_array_equal(rotate(q, angles(0)), q)


def test_rope_write_kv_writes_the_slots_of_its_positions_and_no_other() -> None:
    record, qkv, cache = recorder(), normal(3, 64), NumpyKVCache(KV)
    cache.blocks[...] = np.nan
    rope = np.concatenate([np.cos(normal(40, 4)), np.sin(normal(40, 4))], axis=1)
    out = record.rope_write_kv(record.buffer("tokens", 64), record.weight("rope", rope), KVPlace(1),
                               record.buffer("tokens", 32))
    step = run_one(record, [qkv], one_row_batch([1, 2, 3], 15, [6, 2]), cache)
    heads = qkv.reshape(3, 8, 8)
    for t, (position, block, slot) in enumerate([(15, 6, 15), (16, 2, 0), (17, 2, 1)]):
        np.testing.assert_array_equal(step.buffers[out.buffer_id][t], rotate(heads[t, :4], rope[position]).reshape(-1))
        np.testing.assert_array_equal(cache.blocks[block, 1, 0, slot], rotate(heads[t, 4:6], rope[position]))
        np.testing.assert_array_equal(cache.blocks[block, 1, 1, slot], heads[t, 6:])
    assert np.isfinite(cache.blocks).sum() == 3 * 2 * 2 * 8


def test_paged_attention_is_causal_attention() -> None:
    record, q, cache = recorder(), normal(3, 32), NumpyKVCache(KV)
    cache.blocks[...] = np.nan
    keys, values = normal(18, 2, 8), normal(18, 2, 8)
    for position in range(18):
        cache.write(0, (6, 2)[position // 16], position % 16, keys[position], values[position])
    out = record.paged_attention(record.buffer("tokens", 32), KVPlace(0), 0.35, record.buffer("tokens", 32))
    y = run_one(record, [q], one_row_batch([1, 2, 3], 15, [6, 2, 7]), cache).buffers[out.buffer_id]
    for t in range(3):
        for head in range(4):
            seen = slice(0, 16 + t)
            scores = keys[seen, head // 2].astype(np.float64) @ q[t, 8 * head : 8 * head + 8] * 0.35
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(y[t, 8 * head : 8 * head + 8], weights @ values[seen, head // 2], rtol=1e-4,
                                       atol=1e-6)


def test_a_window_hides_what_lies_before_it() -> None:
    record, q, cache = recorder(), normal(1, 32), NumpyKVCache(KV)
    cache.blocks[...] = np.nan
    keys, values = normal(40, 2, 8), normal(40, 2, 8)
    for position in range(30, 40):
        cache.write(0, (6, 2, 5)[position // 16], position % 16, keys[position], values[position])
    out = record.paged_attention(record.buffer("tokens", 32), KVPlace(0, window=10), 0.35, record.buffer("tokens", 32))
    y = run_one(record, [q], one_row_batch([1], 39, [NULL_BLOCK, 2, 5]), cache).buffers[out.buffer_id]
    scores = keys[30:, 0].astype(np.float64) @ q[0, :8] * 0.35
    np.testing.assert_allclose(y[0, :8], np.exp(scores) / np.exp(scores).sum() @ values[30:, 0], rtol=1e-4, atol=1e-6)


def test_silu_mul_survives_large_gates() -> None:
    record, gate_up = recorder(), normal(5, 24)
    gate_up[0, :2] = [-500, 500]
    out = record.silu_mul(record.buffer("tokens", 24), record.buffer("tokens", 12))
    y = run_one(record, [gate_up]).buffers[out.buffer_id]
    gate, up = gate_up[:, :12].astype(np.float64), gate_up[:, 12:]
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-30)


def test_layer_norm_and_slices() -> None:
    record, x, weight, bias = recorder(), normal(5, 32) + 2, normal(32), normal(32)
    out = record.layer_norm(record.buffer("tokens", 32), record.weight("w", weight), record.weight("b", bias), 1e-5,
                            record.buffer("tokens", 32))
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(run_one(record, [x]).buffers[out.buffer_id], expected, rtol=1e-4, atol=2e-6)
    record = recorder()
    record.rms_norm_slices(record.buffer("tokens", 32), record.weight("w", weight[:8]), 1e-5, 8, 2)
    y, expected = run_one(record, [x]).buffers[0], wide.copy()
    for first in (8, 16):
        part = wide[:, first : first + 8]
        expected[:, first : first + 8] = part / np.sqrt((part**2).mean(1, keepdims=True) + 1e-5) * weight[:8]
    np.testing.assert_allclose(y, expected, rtol=2e-6)


def test_gelu_scale_softcap_and_scaled_add() -> None:
    record, gate_up = recorder(), normal(5, 24) * 3
    out = record.gelu_tanh_mul(record.buffer("tokens", 24), record.buffer("tokens", 12))
    gate, up = gate_up[:, :12].astype(np.float64), gate_up[:, 12:]
    expected = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(run_one(record, [gate_up]).buffers[out.buffer_id], expected, rtol=1e-4, atol=1e-6)
    x, y = normal(5, 8), normal(5, 8)
    for write, expected in ((lambda r, b: r.scale(b, 3.0), x * 3), (lambda r, b: r.softcap(b, 2.0), 2 * np.tanh(x / 2)),
                            (lambda r, b: r.add(b, r.buffer("tokens", 8), 0.5), x + y / 2)):
        record = recorder()
        write(record, record.buffer("tokens", 8))
        np.testing.assert_allclose(run_one(record, [x, y]).buffers[0], expected, rtol=1e-6)


def routes_of(ids: list[list[int]], shares: list[list[float]]) -> np.ndarray:
    return np.concatenate([np.array(ids, np.float32), np.array(shares, np.float32)], axis=1)


@pytest.mark.parametrize("renormalise", [False, True])
def test_route_takes_the_largest_logits_and_of_equal_ones_the_lowest_ids(renormalise: bool) -> None:
    record, logits = recorder(), normal(5, 6)
    logits[1], logits[2] = [1, 3, 3, 0, 3, 3], [np.nan, 1, 2, 3, 4, 5]
    out = record.route(record.buffer("tokens", 6), 3, renormalise, record.buffer("tokens", 6))
    routes = run_one(record, [logits]).buffers[out.buffer_id]
    assert routes[1, :3].tolist() == [1, 2, 4]
    assert len(set(routes[2, :3])) == 3 and np.isnan(routes[2, 3:]).all()
    for t in (0, 3, 4):
        chosen = np.sort(np.argsort(-logits[t])[:3])
        shares = np.exp(logits[t].astype(np.float64)) / np.exp(logits[t].astype(np.float64)).sum()
        expected = shares[chosen] / (shares[chosen].sum() if renormalise else 1)
        np.testing.assert_array_equal(routes[t, :3], chosen)
        np.testing.assert_allclose(routes[t, 3:], expected, rtol=1e-5)


def test_rows_go_to_their_experts_and_come_back_weighted() -> None:
    """Tokens 0 to 4 to experts 0 to 3 of which none takes 3; rows lie by expert, then by token."""
    routes = routes_of([[0, 2], [1, 2], [0, 1], [0, 2], [1, 2]], [[0.25, 0.75]] * 4 + [[1.0, 0.0]])
    by_expert = [0, 2, 3, 1, 2, 4, 0, 1, 3, 4]
    record, x = recorder(), normal(5, 8)
    plain, choices, wide = record.buffer("tokens", 8), record.buffer("tokens", 4), record.buffer("routed", 8)
    experts = [normal(6, 8) for _ in range(4)]
    names = tuple(record.weight(f"w{e}", NumpyBackend().pack([encoded("w", weight, "F32")], "f32"))
                  for e, weight in enumerate(experts))
    narrow = record.buffer("routed", 7)
    record.route(record.buffer("tokens", 4), 2, True, choices)
    record.gather_routed(plain, choices, wide)
    record.expert_linear(wide, choices, names, narrow, 1)
    back = record.combine_routed(narrow, choices, record.buffer("tokens", 7))
    program = record.finish()
    step = NumpyStep(program, NumpyKVCache(KV), one_row_batch(range(5), 0, [0, 1]))
    step.buffers[plain.buffer_id][:], step.buffers[choices.buffer_id][:] = x, routes
    for node in program.nodes[1:]:
        VERBS[node.verb](step, node)
    np.testing.assert_array_equal(step.buffers[wide.buffer_id], x[by_expert])
    for t in range(5):
        expected = sum(routes[t, 2 + j] * (experts[int(routes[t, j])].astype(np.float64) @ x[t]) for j in range(2))
        np.testing.assert_allclose(step.buffers[back.buffer_id][t, 1:], expected, rtol=1e-4, atol=1e-5)
    assert not step.buffers[narrow.buffer_id][:, 0].any()


def test_add_gated_opens_and_shuts() -> None:
    record, x, y, gate = recorder(), normal(5, 8), normal(5, 8), np.array([[0], [500], [-500], [1], [-2]], np.float32)
    record.add_gated(record.buffer("tokens", 8), record.buffer("tokens", 8), record.buffer("tokens", 1))
    got = run_one(record, [x, y, gate]).buffers[0]
    np.testing.assert_allclose(got, x + y / (1 + np.exp(-gate.astype(np.float64))), rtol=1e-5, atol=1e-6)


def test_add_and_select_wanted() -> None:
    record, x, y = recorder(), normal(5, 8), normal(5, 8)
    record.add(record.buffer("tokens", 8), record.buffer("tokens", 8))
    np.testing.assert_array_equal(run_one(record, [x, y]).buffers[0], x + y)
    record = recorder()
    record.select_wanted(record.buffer("tokens", 8), record.buffer("wanted", 8))
    batch = ForwardBatch(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32), np.array([0, 5], np.int32),
                         np.zeros((1, 1), np.int32), np.array([1, 4], np.int32), np.zeros((0, 2), np.int32),
                         sampling_rows(2))
    np.testing.assert_array_equal(run_one(record, [x], batch).buffers[1], x[[1, 4]])
