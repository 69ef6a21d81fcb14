"""The recorded program computes the network: against plain attention written out here, and stacking changes nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.errors import ConfigError, ModelError
from paceline.model.decoder import estimated_weights_bytes, form_of, record_decoder, weights_bytes
from paceline.model.rope import rope_table
from paceline.model.spec import ModelSpec, Weights
from paceline.ops.dequantize import dequantize
from paceline.ops.numpy_ops import NumpyBackend
from tests.runner.helpers import BACKENDS, Generation, generate, kv_of, make_executor, prompt, random_weights, tiny_spec
from tests.runner.helpers import one_row_batch as batch_of

TOKENS = prompt(2, 45)


def program_of(spec: ModelSpec, weights: Weights, dtype: str = "f32"):    # type: ignore[no-untyped-def]
    return record_decoder(spec, weights, NumpyBackend(), dtype, spec.max_position)


def all_logits(spec: ModelSpec, weights: Weights, backend_name: str = "numpy", dtype: str = "f32") -> np.ndarray:
    backend = BACKENDS[backend_name]()
    program = record_decoder(spec, weights, backend, dtype, spec.max_position)
    runner = backend.bind(program, kv_of(spec, dtype="f32"))
    logits = runner.step(batch_of(TOKENS, 0, [4, 1, 9]), wants_logits=True).logits
    assert logits is not None
    return logits


def plain_forward(spec: ModelSpec, weights: Weights, tokens: list[int]) -> np.ndarray:
    """The whole network over the whole sequence at once, in float64: no cache, no blocks, no program."""
    def w(name: str) -> np.ndarray:
        found = weights[name]
        return (found if isinstance(found, np.ndarray) else dequantize(found)).astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * w(name)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w(name).T + (w(name + "_bias") if name + "_bias" in weights else 0)

    def turn(heads: np.ndarray) -> np.ndarray:    # [n, heads, D]
        half = spec.head_dim // 2
        angles = np.arange(len(heads))[:, None] * spec.rope_theta ** (-2 * np.arange(half) / spec.head_dim)
        rotation = np.exp(1j * angles)[:, None]
        turned = (heads[..., :half] + 1j * heads[..., half:]) * rotation
        return np.concatenate([turned.real, turned.imag], -1)

    x, n, group = w("embed")[tokens], len(tokens), spec.num_heads // spec.num_kv_heads
    for layer in range(spec.num_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attn_norm")
        q = turn(project(h, at + "q").reshape(n, spec.num_heads, -1))
        k = turn(project(h, at + "k").reshape(n, spec.num_kv_heads, -1)).repeat(group, axis=1)
        v = project(h, at + "v").reshape(n, spec.num_kv_heads, -1).repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + project(attended.reshape(n, -1), at + "o")
        h = norm(x, at + "mlp_norm")
        gate = project(h, at + "gate")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, at + "up"), at + "down")
    return project(norm(x, "final_norm"), "embed" if spec.has_tied_head else "head")


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"has_qkv_bias": True, "has_tied_head": False}, {"num_kv_heads": 1},
                                     {"num_heads": 6, "num_kv_heads": 6, "head_dim": 32, "rope_theta": 1e6}], ids=str)
def test_logits_are_those_of_plain_attention(backend_name: str, changes: dict) -> None:
    spec = tiny_spec(**changes)
    weights = random_weights(spec, seed=3)
    logits, plain = all_logits(spec, weights, backend_name), plain_forward(spec, weights, TOKENS)
    assert np.abs(logits - plain).max() <= 1e-5 * np.abs(plain).max()


def test_equal_forms_are_stacked() -> None:
    program = program_of(tiny_spec(), random_weights(tiny_spec()))
    assert Counter(node.verb for node in program.nodes) == {
        "embed": 1, "rms_norm": 5, "linear": 2 * 4 + 1, "rope_write_kv": 2, "paged_attention": 2, "silu_mul": 2,
        "add": 4, "select_wanted": 1, "sample": 1}
    assert "layers.0.qkv" in program.weights and "layers.1.gate_up" in program.weights


def test_stacked_linears_equal_separate_ones() -> None:
    """With dtype auto a weight of another type gets its own linear; with dtype f32 all are stacked."""
    spec = tiny_spec(has_qkv_bias=True)
    types = {"k": "Q8_0", "up": "Q4_1", "v": "F32", "embed": "F32"}
    weights = random_weights(spec, types=lambda name: types.get(name, "F32"))
    separate, stacked = program_of(spec, weights, "auto"), program_of(spec, weights, "f32")
    assert [n.attrs["out_column"] for n in separate.nodes if n.verb == "linear"][:4] == [0, 64, 96, 0]
    assert len([n for n in stacked.nodes if n.verb == "linear"]) == 9
    np.testing.assert_array_equal(all_logits(spec, weights, dtype="auto"), all_logits(spec, weights, dtype="f32"))


def test_a_tied_head_is_the_embedding_packed_once() -> None:
    spec = tiny_spec()
    program = program_of(spec, random_weights(spec))
    embed, head = program.nodes[0], program.nodes[-2]
    assert (embed.verb, head.verb) == ("embed", "linear") and embed.weights == head.weights
    assert "head" not in program.weights
    untied = tiny_spec(has_tied_head=False)
    assert "head" in program_of(untied, random_weights(untied)).weights


def test_auto_takes_each_sources_own_form() -> None:
    expected = {"F32": "f32", "BF16": "bf16", "F16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}
    assert {source: form_of(source, "auto") for source in expected} == expected
    assert form_of("Q4_1", "f32") == "f32"
    with pytest.raises(ModelError, match="IQ4_XS"):
        form_of("IQ4_XS", "auto")
    with pytest.raises(ConfigError, match="fp7"):
        form_of("F32", "fp7")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
def test_a_named_form_applies_to_every_matrix(dtype: str) -> None:
    weights = random_weights(tiny_spec(), types=lambda name: "Q8_0" if name == "embed" else "F32")
    program = program_of(tiny_spec(), weights, dtype)
    assert {w.form for w in program.weights.values() if not isinstance(w, np.ndarray)} == {dtype}


def test_layers_share_their_buffers() -> None:
    two, four = (program_of(s, random_weights(s)) for s in (tiny_spec(), tiny_spec(num_layers=4)))
    assert len(two.buffers) == len(four.buffers)


def test_progress_reaches_the_total() -> None:
    spec, seen = tiny_spec(has_tied_head=False), []
    weights = random_weights(spec)
    program = record_decoder(spec, weights, NumpyBackend(), "f32", 64, lambda done, total: seen.append((done, total)))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(set(totals)) == 1
    assert weights_bytes(program) >= 4 * done[-1] == estimated_weights_bytes(spec, weights, "f32")
    assert estimated_weights_bytes(spec, weights, "int4") == done[-1] * 5 // 8
    assert estimated_weights_bytes(spec, weights, "auto") == 4 * done[-1]


def test_rope_angles_are_computed_in_double() -> None:
    table = rope_table(8192, 64, 1e6)
    assert table.shape == (8192, 64) and table.dtype == np.float32
    assert table[8191, 1] == np.float32(np.cos(8191 * 1e6 ** (-2 / 64)))
    assert table[8191, 32] == np.float32(np.sin(8191.0))


def test_wrong_weights_are_named() -> None:
    spec = tiny_spec()
    weights = dict(random_weights(spec))
    for name, bad in (("layers.1.o", None), ("layers.0.q", weights["layers.0.k"]), ("final_norm", np.ones(3))):
        broken = {**weights, name: bad}
        with pytest.raises(ModelError, match=name):
            program_of(spec, {k: v for k, v in broken.items() if v is not None})
    with pytest.raises(ConfigError, match="256"):
        record_decoder(spec, weights, NumpyBackend(), "f32", 257)


def test_generation_with_every_source_type() -> None:
    types = iter(["Q8_0", "Q4_1", "BF16", "F16", "Q4_0", "F32"] * 10)
    spec = tiny_spec()
    hero = Generation("hero", list(TOKENS), (0, 1, 2, 3))
    generate(make_executor(weights=random_weights(spec, types=lambda name: next(types)), dtype="auto"), [hero])
    assert hero.is_done
