"""The recorded program computes the network: against plain attention written out here, and stacking changes nothing."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from paceline.errors import ConfigError, ModelError
from paceline.model.decoder import (
    estimated_weights_bytes,
    form_of,
    num_active_weights,
    num_matrix_weights,
    record_decoder,
    weights_bytes,
)
from paceline.model.dummy import DUMMY_SPECS
from paceline.model.rope import rope_table
from paceline.model.spec import ModelSpec, Weights
from paceline.ops.dequantize import dequantize
from paceline.ops.numpy_ops import NumpyBackend
from tests.runner.helpers import (
    BACKENDS,
    Generation,
    encoded,
    generate,
    kv_of,
    make_executor,
    prompt,
    random_weights,
    tiny_spec,
)
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

    def mlp(h: np.ndarray, at: str) -> np.ndarray:
        gate = project(h, at + "gate")
        return project(gate / (1 + np.exp(-gate)) * project(h, at + "up"), at + "down")

    def experts(h: np.ndarray, at: str) -> np.ndarray:
        share = np.exp(project(h, at + "router"))
        share /= share.sum(-1, keepdims=True)
        share[share < np.sort(share)[:, -spec.experts_per_token, None]] = 0
        if spec.has_renormalised_shares:
            share /= share.sum(-1, keepdims=True)
        out = sum(share[:, e, None] * mlp(h, f"{at}experts.{e}.") for e in range(spec.num_experts))
        if spec.shared_intermediate_size:
            out += mlp(h, at + "shared_") / (1 + np.exp(-project(h, at + "shared_router")))
        return out

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
        x = x + (experts(h, at) if spec.has_experts(layer) else mlp(h, at))
    return project(norm(x, "final_norm"), "embed" if spec.has_tied_head else "head")


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"has_qkv_bias": True, "has_tied_head": False}, {"num_kv_heads": 1},
                                     {"num_heads": 6, "num_kv_heads": 6, "head_dim": 32, "rope_theta": 1e6}], ids=str)
def test_logits_are_those_of_plain_attention(backend_name: str, changes: dict) -> None:
    spec = tiny_spec(**changes)
    weights = random_weights(spec, seed=3)
    logits, plain = all_logits(spec, weights, backend_name), plain_forward(spec, weights, TOKENS)
    assert np.abs(logits - plain).max() <= 1e-5 * np.abs(plain).max()


EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_intermediate_size": 32}


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"has_renormalised_shares": True, "shared_intermediate_size": 64},
                                     {"dense_layers": (0,), "experts_per_token": 5}], ids=str)
def test_logits_are_those_of_plain_experts(backend_name: str, changes: dict) -> None:
    spec = tiny_spec(**{**EXPERTS, **changes})
    weights = random_weights(spec, seed=4)
    logits, plain = all_logits(spec, weights, backend_name), plain_forward(spec, weights, TOKENS)
    assert np.abs(logits - plain).max() <= 1e-5 * np.abs(plain).max()


def test_an_experts_gate_and_up_are_stacked_and_a_router_stays_f32() -> None:
    spec = tiny_spec(**EXPERTS, shared_intermediate_size=64, dense_layers=(1,))
    program = program_of(spec, random_weights(spec), "int4")
    assert Counter(node.verb for node in program.nodes) == {
        "embed": 1, "rms_norm": 5, "linear": 4 + 6 + 1, "rope_write_kv": 2, "paged_attention": 2, "silu_mul": 3,
        "route": 1, "gather_routed": 1, "expert_linear": 2, "combine_routed": 1, "add_gated": 1, "add": 4,
        "select_wanted": 2, "sample": 1}
    forms = {name: weight.form for name, weight in program.weights.items() if not isinstance(weight, np.ndarray)}
    assert {name for name, form in forms.items() if form != "int4"} == {"layers.0.router", "layers.0.shared_router"}
    assert [name for name in forms if "experts.4" in name] == ["layers.0.experts.4.gate_up", "layers.0.experts.4.down"]


def test_experts_of_several_forms_need_a_dtype_and_those_of_several_types_do_not() -> None:
    """Q5_0 and Q8_0 both become int8."""
    spec, odd = tiny_spec(**EXPERTS), "layers.1.experts.3.up"
    weights = random_weights(spec, types=lambda name: "Q8_0")
    program_of(spec, {**weights, odd: encoded(odd, dequantize(weights[odd]), "Q5_0")}, "auto")
    mixed = {**weights, odd: encoded(odd, dequantize(weights[odd]), "Q4_0")}
    program_of(spec, mixed, "bf16")
    with pytest.raises(ModelError, match=rf"{re.escape(odd)} would be int4 and expert 0's int8: name a dtype"):
        program_of(spec, mixed, "auto")


def test_a_gate_of_another_form_than_up_is_a_linear_of_its_own() -> None:
    spec = tiny_spec(**EXPERTS)
    weights = random_weights(spec, types=lambda name: "Q8_0" if name.endswith(".up") else "F32")
    separate, stacked = program_of(spec, weights, "auto"), program_of(spec, weights, "f32")
    assert [n.attrs["out_column"] for n in separate.nodes if n.verb == "expert_linear"][:3] == [0, 32, 0]
    assert len([n for n in stacked.nodes if n.verb == "expert_linear"]) == 4
    np.testing.assert_array_equal(all_logits(spec, weights, dtype="auto"), all_logits(spec, weights, dtype="f32"))


def test_parameters_that_a_token_meets() -> None:
    """Counted by hand: the whole, less what three idle experts of five have in each of two layers."""
    spec = tiny_spec(**EXPERTS, shared_intermediate_size=64)
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 5 * 64 + 5 * 3 * 32 * 64 + 64 + 3 * 64 * 64
    assert num_matrix_weights(spec) == 160 * 64 + 2 * layer
    assert num_active_weights(spec) == num_matrix_weights(spec) - 2 * 3 * 3 * 32 * 64
    assert num_active_weights(tiny_spec()) == num_matrix_weights(tiny_spec())
    assert 30.4e9 < num_matrix_weights(DUMMY_SPECS["qwen3-30b-a3b"]) < 30.6e9
    assert 3.3e9 < num_active_weights(DUMMY_SPECS["qwen3-30b-a3b"]) < 3.4e9


def test_equal_forms_are_stacked() -> None:
    program = program_of(tiny_spec(), random_weights(tiny_spec()))
    assert Counter(node.verb for node in program.nodes) == {
        "embed": 1, "rms_norm": 5, "linear": 2 * 4 + 1, "rope_write_kv": 2, "paged_attention": 2, "silu_mul": 2,
        "add": 4, "select_wanted": 2, "sample": 1}
    assert "layers.0.qkv" in program.weights and "layers.1.gate_up" in program.weights


@pytest.mark.parametrize("changes, last_verb", (({}, "paged_attention"), (EXPERTS, "add")), ids=("dense", "experts"))
def test_past_the_last_attention_only_wanted_tokens_go_on(changes: dict, last_verb: str) -> None:
    """With experts they do behind the layers."""
    program = program_of(tiny_spec(**changes), random_weights(tiny_spec(**changes)))
    verbs, rows = [node.verb for node in program.nodes], {buffer.buffer_id: buffer.rows for buffer in program.buffers}
    first = verbs.index("select_wanted")
    assert verbs[first - 1] == last_verb and "paged_attention" not in verbs[first:]
    assert {rows[node.output] for node in program.nodes[first:] if node.output is not None} == {"wanted"}


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


@pytest.mark.parametrize("changes", [{}, {**EXPERTS, "dense_layers": (0,), "shared_intermediate_size": 32}], ids=str)
def test_progress_reaches_the_total(changes: dict) -> None:
    spec, seen = tiny_spec(has_tied_head=False, **changes), []
    weights = random_weights(spec)
    program = record_decoder(spec, weights, NumpyBackend(), "f32", 64, lambda done, total: seen.append((done, total)))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(set(totals)) == 1
    assert weights_bytes(program) >= 4 * done[-1] == estimated_weights_bytes(spec, weights, "f32")
    routers = 64 * (5 + 1) if changes else 0    # stay f32
    assert estimated_weights_bytes(spec, weights, "int4") == (done[-1] - routers) * 5 // 8 + 4 * routers
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
